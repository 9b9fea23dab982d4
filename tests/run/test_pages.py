"""Every command of the README, the guides and the how-to pages runs, on the page's own files and in the page's order.

A block ```python NAME is a file NAME. A line `$ …` in a block ```console is a command, with exit code 0 unless the line has `# exit 3`.
Commands that install or submit something are listed in `ELSEWHERE`, and are not run here.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rarely import every

from plait.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "from").glob("*.md")),
    *sorted((ROOT / "docs" / "how_to").glob("*.md")),
]
ELSEWHERE = ("git", "cd", "make", "pip", ".", "srun", "sbatch", "ssh", "export", "deepspeed", "accelerate", "ls")
"""Commands that a page may show and this test does not run: set-up, and other programs."""
FILES = re.compile(r"(?ms)^```\w+ (\S+)\n(.*?)^```$")
COMMANDS = re.compile(r"(?ms)^```console\n(.*?)^```$")


def commands(page: str) -> list[str]:
    """The commands of a page. Lines that end with a backslash are joined."""
    text = "\n".join(COMMANDS.findall(page)).replace("\\\n", " ")
    lines = [line[2:].split("#", 1) for line in text.splitlines() if line.startswith("$ ")]
    return ["  #".join([" ".join(line[0].split()), *line[1:]]) for line in lines]


def run(command: str, folder: Path) -> tuple[int, int, str]:
    """Returns (exit code, expected exit code, output of other programs)."""
    line, _, remark = command.partition("  #")
    wanted = int(found[1]) if (found := re.search(r"exit (\d+)", remark)) else 0
    words = shlex.split(line)
    if words[0] == "plait":
        return main(words[1:]), wanted, ""
    program = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}[words[0]]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(folder)))}
    done = subprocess.run([*program, *words[1:]], cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, wanted, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", every(3, PAGES), ids=lambda p: p.stem)
def test_a_pages_commands_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = path.read_text(encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, text in FILES.findall(page):
        if not name.startswith("examples/"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for command in commands(page):
        if command.split()[0] in ELSEWHERE:
            continue
        code, wanted, said = run(command, tmp_path)
        assert code == wanted, f"{path.name}: {command} ended with {code}, not {wanted}\n{said[-3000:]}"


def test_a_command_that_fails_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = "```console\n$ plait help X999   # exit 2\nerror\n$ plait \\\n  help\n```\n"
    assert commands(page) == ["plait help X999  # exit 2", "plait help"]
    assert run("plait help X999", tmp_path)[:2] == (2, 0)
    assert run("python -c 'raise SystemExit(4)'  # exit 4", tmp_path)[:2] == (4, 4)
