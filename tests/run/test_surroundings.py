"""Unusual environments: plait trains, or prints one clear error. It leaves no traceback, shared memory, temporary folder or process.

Each case has its own process table, mounts and shared memory (`unshare`), so the rest of the machine is neither seen nor disturbed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launched import TEST_JOB
from rarely import seldom

from run.test_mpi import SOURCES

TRAINS, DEEP = "", "/".join(["d" * 200] * 15)
Case = tuple[str, dict[str, str | None], str]
"""The command, additional environment variables, and the error that ends it. If there are several errors, each is valid."""
STREAMS: dict[str, Case] = {
    "stdin is closed": ("{plait} <&-", {}, TRAINS),
    "all standard streams are closed": ("{plait} <&- >&- 2>&-", {}, TRAINS),
    "stdout is closed": ("{plait} >&-", {}, TRAINS),
    "stderr is closed": ("{plait} 2>&-", {}, TRAINS),
    "stderr is full": ("{plait} 2>/dev/full", {}, TRAINS),
    "stdout is full": ("{plait} >/dev/full", {}, "R006"),
    "nobody reads stdout": ("{plait} | true; exit ${{PIPESTATUS[0]}}", {}, TRAINS),
    "stdin never ends": ("{plait} </dev/zero", {}, TRAINS),
    "there is no terminal": ("setsid -w {plait}", {}, TRAINS),
    "the POSIX locale": ("{plait}", {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, TRAINS),
    "a locale that is not there": ("{plait}", {"LC_ALL": "xx_YY.nonsense"}, TRAINS),
    "output is ASCII": ("{plait}", {"PYTHONIOENCODING": "ascii"}, TRAINS),
    "a terminal of one column": ("{plait}", {"COLUMNS": "1", "LINES": "1"}, TRAINS),
    "a terminal of nonsense": ("{plait}", {"COLUMNS": "nonsense", "TERM": "nonsense"}, TRAINS),
}
SIGNALS: dict[str, Case] = {
    "SIGCHLD is ignored": ("trap '' CHLD; {plait}", {}, TRAINS),
    "SIGINT is ignored": ("trap '' INT; {plait}", {}, TRAINS),
    "SIGTERM is ignored": ("trap '' TERM; {plait}", {}, TRAINS),
    "SIGPIPE and SIGHUP are ignored": ("trap '' PIPE HUP; {plait}", {}, TRAINS),
    "all signals are blocked": (
        "{python} -c \"import signal,os,sys; signal.pthread_sigmask(0, range(1, 65)); os.execvp(sys.argv[1], sys.argv[1:])\" {plait}",
        {},
        TRAINS,
    ),
}
FOLDERS: dict[str, Case] = {
    "there is no HOME": ("{plait}", {"HOME": None}, TRAINS),
    "HOME is not there": ("{plait}", {"HOME": "/nowhere"}, TRAINS),
    "HOME cannot be written": ("{plait}", {"HOME": "/proc"}, TRAINS),
    "TMPDIR is not there": ("{plait}", {"TMPDIR": "/nowhere"}, TRAINS),
    "TMPDIR is a file": ("touch file; TMPDIR=$PWD/file {plait}", {}, TRAINS),
    "TMPDIR is relative": ("mkdir relative; TMPDIR=relative {plait}; rmdir relative", {}, TRAINS),
    "TMPDIR has 4 kB": ("mount -t tmpfs -o size=4k none $TMPDIR; {plait}", {}, TRAINS),
    "TMPDIR is read-only": ("mount -t tmpfs -o ro none $TMPDIR; {plait}", {}, TRAINS),
    "/dev/shm has 4 kB": ("mount -o remount,size=4k /dev/shm; {plait}", {}, TRAINS),
    "/dev/shm has 4 kB, and loaders": ("mount -o remount,size=4k /dev/shm; {plait} --workers 1", {}, "H008"),
    "/dev/shm is read-only": ("mount -o remount,ro /dev/shm; {plait}", {}, TRAINS),
    "/dev/shm is read-only, and loaders": ("mount -o remount,ro /dev/shm; {plait} --workers 1", {}, "H008"),
    "/dev/shm is missing": ("{no_shm}; {plait}", {}, TRAINS),
    "/dev/shm is missing, and loaders": ("{no_shm}; {plait} --workers 1", {}, "H008"),
    "/proc is missing": ("umount -l /proc; umount -l /proc; {plait}", {}, "H016"),
    "/proc is that of other processes": ("umount -l /proc; {plait}", {}, "H016"),
    "/sys is empty": ("mount -t tmpfs none /sys; {plait}", {}, TRAINS),
    "the user has no name": ("mount --bind /dev/null /etc/passwd; {plait}", {"USER": None, "LOGNAME": None, "HOME": None}, TRAINS),
    "a path of 3,000 letters": (f"mkdir -p {DEEP} && cd {DEEP} && {{plait}}", {}, TRAINS),
    "the working directory cannot be written": ("cd /proc && {plait}", {}, "R002"),
    "the working directory is gone": ("mkdir gone; cd gone; rmdir ../gone; {plait}", {}, "R002 J001"),
}
RUNS: dict[str, Case] = {
    "a run directory of 4,000 letters": (f"{{plait}} --runs {'r' * 4000}", {}, "R002"),
    "the run directory is a fifo": ("mkfifo f; {plait} --runs f", {}, "R002"),
    "the run directory is a file": ("touch f; {plait} --runs f", {}, "R002"),
    "the run directory is a link to nowhere": ("ln -s nowhere f; {plait} --runs f", {}, "R002"),
    "the run directory is a link to itself": ("ln -s f f; {plait} --runs f", {}, "R002"),
    "the run directory is read-only": ("mkdir f; mount -t tmpfs -o ro none f; {plait} --runs f", {}, "R002"),
    "the run directory has 16 kB": ("mkdir f; mount -t tmpfs -o size=16k none f; {plait} --runs f", {}, "R006"),
    "the run directory has five files": ("mkdir f; mount -t tmpfs -o nr_inodes=5 none f; {plait} --runs f", {}, "R002 R006"),
    "nobody may read what is written": ("umask 777; {plait}", {}, TRAINS),
}
FILES: dict[str, Case] = {
    "the job is a fifo": ("mkfifo f.py; {python} -m plait train f.py", {}, "J001"),
    "the job is a folder": ("mkdir f.py; {python} -m plait train f.py", {}, "J001"),
    "the job is empty": ("touch f.py; {python} -m plait train f.py", {}, "J001 J002 J003 J004"),
    "the job is a link to nowhere": ("ln -s nowhere f.py; {python} -m plait train f.py", {}, "J001"),
    "the job is a link": ("ln -s {job} f.py; {as_job} f.py", {}, TRAINS),
    "the job has a name with spaces": ("cp {job} 'a b.py'; {as_job} 'a b.py'", {}, TRAINS),
    "the job is binary": ("head -c 4000 /dev/urandom >f.py; {python} -m plait train f.py", {}, "J002 J003"),
    "the job has lines of Windows": ("sed 's/$/\\r/' {job} >f.py; {as_job} f.py", {}, TRAINS),
    "the job is Latin-1": ("printf 'x = \"\\xe9\"' >f.py; {python} -m plait train f.py", {}, "J002 J003"),
    "a random.py lies beside the job": ("echo 'x = 1' >random.py; cp {job} f.py; {as_job} f.py", {}, TRAINS),
    "the plan is a fifo": ("mkfifo f.toml; {python} -m plait train {job} --plan f.toml", {}, "T003"),
    "the plan is a folder": ("mkdir f.toml; {python} -m plait train {job} --plan f.toml", {}, "T003"),
    "the plan is binary": ("head -c 4000 /dev/urandom >f.toml; {python} -m plait train {job} --plan f.toml", {}, "T003"),
}
LIMITS: dict[str, Case] = {
    "few files": ("ulimit -n 40; {plait}", {}, TRAINS),
    "next to no files": ("ulimit -n 12; {plait}", {}, "H006"),
    "no file may have a byte": ("ulimit -f 0; {plait}", {}, "R006"),
    "files of 1 kB": ("ulimit -f 1; {plait}", {}, "R006"),
    "a small stack": ("ulimit -s 512; {plait}", {}, TRAINS),
    "no locked memory": ("ulimit -l 0; {plait}", {}, TRAINS),
    "three processes": ("{pids} 3; {plait}", {}, "H006"),
    "ten processes": ("{pids} 10; {plait}", {}, "H006"),
    "little memory": ("{memory} 300M; {plait}", {}, "C003"),
    "one processor": ("taskset -c 0 {plait}", {}, TRAINS),
    "no loopback": ("unshare --net {plait}", {}, "H007"),
    "a host without a name": ("unshare --uts bash -c \"hostname nowhere.invalid; {plait}\"", {}, TRAINS),
}
PYTHON: dict[str, Case] = {
    "no PATH": ("{plait}", {"PATH": None}, TRAINS),
    "Python without assertions": ("{plait}", {"PYTHONOPTIMIZE": "2"}, TRAINS),
    "Python that keeps no bytecode": ("{plait}", {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "7"}, TRAINS),
    "Python without the working directory": ("{plait}", {"PYTHONSAFEPATH": "1"}, TRAINS),
    "Python that looks closely": ("{plait}", {"PYTHONDEVMODE": "1", "PYTHONFAULTHANDLER": "1"}, TRAINS),
    "a nonsensical number of threads": ("{plait}", {"OMP_NUM_THREADS": "nonsense"}, TRAINS),
    "nonsensical devices": ("{plait}", {"CUDA_VISIBLE_DEVICES": "nonsense"}, TRAINS),
    "a nonsensical time zone": ("{plait}", {"TZ": "Nowhere/Nothing"}, TRAINS),
    "a proxy": ("{plait}", {"http_proxy": "http://127.0.0.1:1", "ALL_PROXY": "http://127.0.0.1:1"}, TRAINS),
    "an address of a cluster that is over": ("{plait}", {"MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "29500"}, TRAINS),
}
CASES = STREAMS | SIGNALS | FOLDERS | RUNS | FILES | LIMITS | PYTHON
APART = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", *(["--map-root-user"] if os.geteuid() else [])]
FRAME = """
mount -t tmpfs -o size=1g none /dev/shm
( {case} )
code=$?
mountpoint -q /proc || mount -t proc proc /proc
for try in $(seq 50); do
    COLUMNS=200 ps -eo pid,args --no-headers | awk '$1 != 1 && !/ps -eo|awk/' >{left}.processes
    [ -s {left}.processes ] || break
    sleep 0.1
done
ls /dev/shm >{left}.shared 2>/dev/null
exit $code
"""
NO_SHM = (
    "mkdir dev && mount -t tmpfs none dev && cp -a /dev/null /dev/zero /dev/full /dev/urandom dev && ln -s /proc/self/fd dev/fd"
    " && mount --move dev /dev"
)


def limited(controller: str, file: str, file_v1: str) -> str:
    """Prefix of a command that runs in a control group with a limit."""
    v1 = Path("/sys/fs/cgroup") / controller
    parent, name = (v1, file_v1) if v1.is_dir() else (Path("/sys/fs/cgroup"), file)
    group = parent / f"plait-test-{os.getpid()}"
    return f"limit() {{ mkdir -p {group}; echo $1 >{group}/{name} && echo $BASHPID >{group}/cgroup.procs; }}; limit"


@pytest.fixture(scope="module")
def apart() -> None:
    if shutil.which("unshare") is None or subprocess.run([*APART, "mount", "-t", "tmpfs", "none", "/dev/shm"], capture_output=True).returncode:
        pytest.skip("this system does not let a test have its own mounts and processes")


@pytest.mark.parametrize("name", seldom(8, CASES))
def test_it_trains_or_says_one_clear_error(name: str, tmp_path: Path, apart: None) -> None:
    text, changed, codes = CASES[name]
    flags = "--nproc 2 --steps 3 --check none"
    words = {
        "python": sys.executable,
        "job": TEST_JOB,
        "plait": f"{sys.executable} -m plait train {TEST_JOB} {flags}",
        "as_job": f"{sys.executable} -m plait train {flags}",
        "no_shm": NO_SHM,
        "pids": limited("pids", "pids.max", "pids.max"),
        "memory": limited("memory", "memory.max", "memory.limit_in_bytes"),
    }
    folder, temporary, left = tmp_path / "here", tmp_path / "temporary", tmp_path / "left"
    folder.mkdir()
    temporary.mkdir()
    environment = os.environ | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)} | changed
    environment = {key: value for key, value in environment.items() if value is not None}
    frame = FRAME.format(case=text.format(**words), left=left)
    ran = subprocess.run(
        [shutil.which("unshare") or "", *APART[1:], shutil.which("bash") or "", "-c", f"PATH=$PATH:/usr/bin:/bin:/sbin\n{frame}"],
        cwd=folder, env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=600,
    )  # fmt: skip
    said = (ran.stdout + ran.stderr).decode(errors="replace")
    assert "Traceback" not in said and "Exception ignored" not in said, said
    if codes:
        assert ran.returncode and any(f"error[{code}]" in said for code in codes.split()), (ran.returncode, said)
        assert said.count("error[") == 1, said
    else:
        assert ran.returncode == 0, (ran.returncode, said)
        assert [*folder.rglob("step-000003/MANIFEST*"), *folder.rglob("checkpoints/step-000003")], said
    if name == "the POSIX locale":
        assert "\\x" not in said and "\\u" not in said, said
    assert not Path(f"{left}.shared").read_text(), Path(f"{left}.shared").read_text()
    assert not Path(f"{left}.processes").read_text(), Path(f"{left}.processes").read_text()
    assert not list(temporary.iterdir())
