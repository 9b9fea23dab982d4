"""Plans, machines and weights of unexpected kinds: pipes, devices, huge files, deeply nested or endless text. Each is rejected by name, at
once."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from plait.checkpoint.foreign_weights import open_weights
from plait.cli.main import main
from plait.config.errors import PlaitError
from plait.config.files import open_plain_file, read_plain_file
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.launch import gate

Maker = Callable[[Path], None]


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's name may have at most 107 characters
        try:
            listening.bind(path.name)
        finally:
            os.chdir(here)


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


KINDS: dict[str, Maker] = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir,
    "sparse": _sparse,
    "missing": lambda path: None,
}
TEXTS = {
    "deep": b"a=" + b"[" * 100_000,
    "deep tables": b"[" + b".".join([b"a"] * 30_000) + b"]\n",
    "huge number": b"nodes = " + b"9" * 5001,
    "huge in the device": b'name = "x"\n[device]\nname = "x"\nmemory_gib = 1' + b"0" * 4000,
    "huge hexadecimal": b'name = "x"\nnodes = 0x' + b"f" * 6000 + b'\n[device]\nname = "x"\nmemory_gib = 1',
    "tiny": b'name = "x"\n[device]\nname = "x"\nmemory_gib = 1\nmemory_gb_per_s = 1e-320',
    "nan": b'name = "x"\n[device]\nname = "x"\nmemory_gib = nan',
    "inf": b'name = "x"\n[device]\nname = "x"\nmemory_gib = inf',
    "utf-16": '[split]\ndp = 2\nname = "x"'.encode("utf-16"),
    "latin": b'name = "\xe9"\n',
    "zeros": bytes(4096),
    "nothing": b"",
    "a list": b"[[device]]\n",
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_plain_file(tmp_path: Path, kind: str) -> None:
    for reader, name, code in (
        (Plan.load, "plan.toml", "T003"),
        (Plan.load, "plan.json", "T003"),
        (Machine.load, "machine.toml", "M012"),
        (lambda path: open_weights(Path(path)), "model.safetensors", "K007"),
    ):
        path = tmp_path / name
        KINDS[kind](path)
        with pytest.raises(PlaitError) as caught:
            reader(str(path))
        expected = {"K002"} if name == "model.safetensors" and kind in ("sparse",) else {code}
        assert set(caught.value.codes) == expected, str(caught.value)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_no_person_wrote(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(TEXTS[text])
    if text not in ("nothing",):
        with pytest.raises(PlaitError) as caught:
            Plan.load(path)
        assert set(caught.value.codes) <= {"T001", "T002", "T003"}
    with pytest.raises(PlaitError) as caught:
        Machine.load(path)
    assert set(caught.value.codes) <= {"M011", "M012"} and len(str(caught.value)) < 6000


@pytest.mark.parametrize("number", ("1" + "0" * 4000, "0x" + "f" * 6000, "-1", "[[[[]]]]", '{"a": {}}', '"x"', "1e400"))
def test_numbers_of_a_plan(tmp_path: Path, number: str) -> None:
    for name, text in (("plan.toml", f"[split]\ndp = {number}\n"), ("plan.json", f'{{"split": {{"dp": {number}}}}}')):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(PlaitError) as caught:
            Plan.load(path)
        assert set(caught.value.codes) <= {"T001", "T002", "T003"}


@pytest.mark.parametrize("path", ("/dev/zero", "/dev/stdin", "x" * 5000, "/proc/self/mem", "a\0b.toml", ""))
def test_paths_that_no_file_has(path: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("import plait\n\ndef job():\n    raise RuntimeError\n")
    for words in (("--plan", f"{path}.toml"), ("--plan", path)):
        assert main(["train", str(job), *words]) == 2
    for error in (lambda: Machine.load(path), lambda: open_weights(Path(path))):
        with pytest.raises(PlaitError):
            error()
    assert "Traceback" not in capfd.readouterr().err


def test_a_plain_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert read_plain_file(path, 3) == b"abc"
    (tmp_path / "link").symlink_to(path)
    with open_plain_file(tmp_path / "link") as file:
        assert file.read() == b"abc"
    for wrong in (lambda: read_plain_file(path, 2), lambda: open_plain_file(tmp_path / "link", follow=False)):
        with pytest.raises(OSError, match=r"at most 2|a link"):
            wrong()
    with open(tmp_path / "holes", "wb") as file:
        file.truncate(1 << 20)
    assert read_plain_file(tmp_path / "holes", 1 << 20) == bytes(1 << 20), "a file may have holes"


@pytest.mark.parametrize("kind", ("fifo", "folder", "large", "no text"))
def test_a_secret_that_is_no_small_file_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of a fifo without a writer would never end."""
    monkeypatch.delenv("PLAIT_SECRET", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "plait" / "secret"
    file.parent.mkdir()
    if kind == "fifo":
        os.mkfifo(file, 0o600)
    elif kind == "folder":
        file.mkdir(mode=0o700)
    else:
        file.write_bytes(b"0" * 10_000 if kind == "large" else b"\xff" * 40)
        file.chmod(0o600)
    with pytest.raises(PlaitError) as caught:
        gate.make_job_key("job")
    assert caught.value.codes == ["L008"] and str(file) in str(caught.value)
