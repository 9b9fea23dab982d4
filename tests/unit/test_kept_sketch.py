"""A second plan of a job uses the cached sketch of the first, unless one of the job's inputs has changed."""

import ctypes.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from plait.cli import cached_sketch
from plait.cli.cached_sketch import JobFindings, build_plan_request
from plait.config.command_options import PlanOptions
from plait.config.job import load_job
from plait.config.machine import Machine
from plait.launch import sketch_cache
from plait.launch.sketch_cache import FileWatch, State, load_record, make_cache_key, read_file_state, save_record
from plait.planner.answer import find_answer, format_answer
from plait.planner.plan_request import PlanRequest

JOB = """
import torch, plait
from torch import nn
from pathlib import Path

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Data:
    def __len__(self): return 64
    def __getitem__(self, i): return torch.zeros(16), torch.zeros(16)

def job(width: int = 16):
    width = int((Path(__file__).parent / "width.txt").read_text()) if (Path(__file__).parent / "width.txt").exists() else width
    return plait.Job(
        model=lambda: nn.Sequential(*(Block(width) for _ in range(4))), loss=nn.functional.mse_loss, data=Data, clip=1.0,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), batch=8, steps=3, schedule=lambda samples: 1.0, tensor={"*.up": "column"},
        evaluate=plait.Evaluate(data=Data, metrics=lambda o, t: {"error": (o - t).mean(1)}), ema=plait.EMA(0.9),
    )
"""
MACHINE = Machine.from_name("h100x8")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for caches. Files that the test has just written count as old."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sketch_cache, "START_MARGIN_NS", -(10**18))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path / "cache" / "plait" / "sketches"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.py").write_text(JOB)
    yield tmp_path / "job" / "job.py"
    for name in [name for name in sys.modules if name.startswith("plait_job_")]:
        del sys.modules[name]


def asked(job: Path, **given: Any) -> PlanRequest:
    """Runs as in a separate process, in which no job was loaded before."""
    path = sys.path[:]
    try:
        return _asked(job, **given)
    finally:
        sys.path[:] = path


def _asked(job: Path, **given: Any) -> PlanRequest:
    return build_plan_request(PlanOptions(job=str(job), **given), MACHINE, split=True, tp=True, say=lambda text: None)


def answer(found: PlanRequest) -> dict[str, Any]:
    facts = find_answer(found, {}).to_dict()
    return {name: value for name, value in facts.items() if name not in ("took_seconds", "sketch_age_seconds")}


def test_a_second_plan_runs_nothing_of_the_job(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = asked(job)
    monkeypatch.setattr(cached_sketch, "load_job", lambda *_: pytest.fail("the job was loaded"))
    second = asked(job)
    assert first.sketch_age is None and second.sketch_age is not None and answer(first) == answer(second)
    assert "sketch of" in format_answer(find_answer(second, {})) and "sketch of" not in format_answer(find_answer(first, {}))
    assert answer(asked(job, batch=32))["batch"] == 32


@pytest.mark.slow
@pytest.mark.parametrize(("more", "code"), [((), 0), (("--memory", "1MB"), 1)])
def test_a_plan_ends_without_freeing_its_model(job: Path, more: tuple[str, ...], code: int) -> None:
    """Handlers of `atexit` run, all output is written, and the exit code is that of the command."""
    job.write_text(JOB + """
import atexit
class Held:
    def __del__(self): print("freed")
HELD = Held()
atexit.register(print, "handler of the job")
""")
    done = subprocess.run([sys.executable, "-m", "plait", "plan", str(job), "--machine", "h100x8", *more], capture_output=True, text=True)
    assert done.returncode == code and done.stdout.endswith("handler of the job\n") and "freed" not in done.stdout, done
    assert len(done.stdout.splitlines()) > 3


@pytest.mark.slow
def test_a_second_plan_of_a_config_loads_no_model_and_prints_the_same(tmp_path: Path) -> None:
    """Of a Hugging Face config too: the values that it takes by default are printed again. A changed config is read again."""
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2, "vocab_size": 32, "n_positions": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = """
import sys
from plait.launch import sketch_cache
sketch_cache.START_MARGIN_NS, sys.dont_write_bytecode = -(10**18), True
from plait.cli.main import main
main(["plan", f"hf:{sys.argv[1]}", "--machine", "h100x8"])
print("loaded", "transformers" in sys.modules)
"""

    def plan() -> tuple[str, str, str]:
        words = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")})
        head, *rest, loaded = done.stdout.splitlines()
        return done.stderr, head.partition(" · sketch of")[0] + "\n".join(row for row in rest if not row.startswith("searched")), loaded

    first, second = plan(), plan()
    assert f"job       hf:{tmp_path}: GPT2LMHeadModel on random tokens" in first[0] and first[:2] == second[:2]
    assert (first[2], second[2]) == ("loaded True", "loaded False")
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": 4}))
    assert plan()[2] == "loaded True"


def test_what_a_second_plan_does_not_need_is_not_imported() -> None:
    large = {"torch._dynamo", "sympy", "triton", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers"}
    code = f"import sys, plait.cli.plan; print(*{large} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_what_was_kept_calls_the_job_for_the_rest(job: Path) -> None:
    asked(job)
    second = asked(job)
    assert second.sketch_age is not None and second.job.schedule is not None and second.job.evaluate is not None
    assert len(second.job.data()) == len(second.job.evaluate.data()) == 64 and second.job.schedule(8) == 1.0
    assert (second.job.clip, second.job.ema, second.job.tensor) == (1.0, load_job(str(job)).ema, {"*.up": "column"})


@pytest.mark.parametrize("change", ["edited", "new file", "argument", "environment", "fresh", "torch", "damaged", "helper"])
def test_a_sketch_is_made_again(job: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    if change == "helper":
        (job.parent / "sizes.py").write_text("FACTOR = 1\n")
        job.write_text(JOB.replace("import torch, plait", "import torch, plait, sizes"))
    asked(job)
    assert asked(job).sketch_age is not None
    given: dict[str, Any] = {}
    if change == "edited":
        job.write_text(JOB + "# later\n")
    elif change == "helper":
        (job.parent / "sizes.py").write_text("FACTOR = 16\n")
    elif change == "new file":  # the job only checked whether it exists
        (job.parent / "width.txt").write_text("16")
    elif change == "argument":
        given = {"arguments": {"width": "16"}}
    elif change == "environment":
        monkeypatch.setenv("WIDTH", "32")
    elif change == "fresh":
        given = {"fresh": True}
    elif change == "torch":
        monkeypatch.setattr("torch.__version__", "99.0")
    else:
        (file,) = cache.iterdir()
        file.write_bytes(file.read_bytes()[:-1] + b"\0")
    if change in ("edited", "helper"):
        for name in ("plait_job_job", "sizes"):
            sys.modules.pop(name, None)
    assert asked(job, **given).sketch_age is None


def test_what_cannot_be_told_by_values_is_not_kept(job: Path) -> None:
    first = PlanRequest.from_job(load_job(str(job)), str(job), MACHINE)
    assert JobFindings.from_request(first) is not None
    assert JobFindings.from_request(replace(first, shardable=replace(first.shardable, tp_failure="too large"))) is None


def test_new_files_may_have_changed_after_they_were_read(job: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_cache, "START_MARGIN_NS", 10**18)
    asked(job)
    assert asked(job).sketch_age is None and not cache.exists()


def test_bytecode_beside_the_job_is_no_new_file(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job.parent / "sizes.py").write_text("WIDTH = 16")
    job.write_text(f"import sizes\n{job.read_text()}")
    for file in (job.parent / "sizes.py", job, job.parent):
        os.utime(file, (1, 1))
    began = time.time_ns() + sketch_cache.START_MARGIN_NS
    monkeypatch.setattr(sketch_cache.psutil.Process, "create_time", lambda self: began / 1e9)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.delitem(sys.modules, "sizes", raising=False)
    asked(job)
    assert (job.parent / "__pycache__").exists() and asked(job).sketch_age is not None


def test_a_library_that_is_looked_for_starts_processes() -> None:
    plain = ctypes.util.find_library
    with FileWatch() as watch:
        found = ctypes.util.find_library("c")
    assert ctypes.util.find_library is plain and found == plain("c")
    assert not watch.reason and sketch_cache.LIBRARY_CACHE in watch.paths


# — what is watched —


def states(*paths: Path) -> dict[str, State]:
    return {str(path): read_file_state(str(path), path.is_dir()) for path in paths}


def kept_of(tmp_path: Path, *paths: Path, content: bytes = b"content") -> bool:
    watch = FileWatch()
    watch.paths = {str(path): path.is_dir() for path in paths}
    return save_record("key", content, watch, states(*paths))


def test_a_changed_file_or_folder_is_seen(tmp_path: Path) -> None:
    file, folder, missing = tmp_path / "file", tmp_path / "folder", tmp_path / "missing"
    for change in (lambda: file.write_text("other"), lambda: (folder / "new").write_text(""), lambda: missing.write_text(""), file.unlink):
        file.write_text("text")
        folder.mkdir(exist_ok=True)
        missing.unlink(missing_ok=True)
        os.utime(file, (1, 1))
        os.utime(folder, (1, 1))
        assert kept_of(tmp_path, file, folder, missing)
        found = load_record("key")
        assert found is not None and found.content == b"content" and found.age >= 0
        change()
        assert load_record("key") is None


def test_what_code_looks_at_is_noted(tmp_path: Path) -> None:
    (tmp_path / "read").write_text("text")
    with FileWatch() as watch:
        Path(tmp_path / "read").read_text()
        os.listdir(tmp_path)
        os.path.exists(tmp_path / "missing")
        with sketch_cache.pause_watches():
            os.path.getsize(tmp_path / "read")
    assert watch.paths[str(tmp_path / "read")] is False and watch.paths[str(tmp_path)] is True
    assert str(tmp_path / "missing") in watch.paths and not watch.reason
    assert os.stat.__module__ == "posix"
    (tmp_path / "later").write_text("")
    assert str(tmp_path / "later") not in watch.paths


@pytest.mark.parametrize("act", [
    lambda path: path.write_text("text"), lambda path: path.mkdir(), lambda _: subprocess.run(["true"], check=True),
    lambda _: socket.getaddrinfo("127.0.0.1", 1), lambda path: os.system("true"),
])  # fmt: skip
def test_code_that_may_do_something_else_next_time_is_not_trusted(tmp_path: Path, act: Any) -> None:
    with FileWatch() as watch:
        act(tmp_path / "new")
    assert watch.reason


def test_the_key_names_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = make_cache_key("job")
    assert make_cache_key("job") == before != make_cache_key("other")
    monkeypatch.setenv("WIDTH", "32")
    assert make_cache_key("job") != before
    monkeypatch.delenv("WIDTH")
    assert make_cache_key("job") == before
    monkeypatch.chdir(tmp_path)
    assert make_cache_key("job") != before


def test_another_shell_has_the_same_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two system shells: one nested in the other, one that changes folders, and both after another command."""
    if (bash := shutil.which("bash")) is None:
        pytest.skip("bash is not there")
    code = f"{sys.executable} -c 'from plait.launch.sketch_cache import make_cache_key; print(make_cache_key(1))'"
    monkeypatch.chdir(tmp_path)
    found = [
        subprocess.run([bash, "-c", shell], capture_output=True, text=True, check=True).stdout
        for shell in (f"{code}; true", f"cd /; cd - > /dev/null; true; {code}; true", f"{bash} -c \"{code}; true\"; true")
    ]
    assert len(set(found)) == 1


@pytest.mark.parametrize("damage", [b"", b"short", bytes(100)])
def test_a_damaged_record_counts_as_none(cache: Path, tmp_path: Path, damage: bytes) -> None:
    assert kept_of(tmp_path)
    (cache / "key").write_bytes(damage)
    assert load_record("key") is None
    assert kept_of(tmp_path) and load_record("key") is not None


def test_a_flipped_bit_is_seen(cache: Path, tmp_path: Path) -> None:
    assert kept_of(tmp_path)
    raw = bytearray((cache / "key").read_bytes())
    for at in range(0, len(raw), 7):
        raw[at] ^= 1
        (cache / "key").write_bytes(raw)
        assert load_record("key") is None
        raw[at] ^= 1


def test_without_room_or_right_nothing_is_kept(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, job: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert not kept_of(tmp_path) and load_record("key") is None and asked(job).sketch_age is None
    (tmp_path / "cache").unlink()

    def full(self: Path, data: bytes) -> int:
        with open(self, "wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert not kept_of(tmp_path) and load_record("key") is None and not [*cache.iterdir()]


def test_two_plans_at_once(tmp_path: Path) -> None:
    contents = [bytes([k]) * 100_000 for k in range(4)]
    threads = [Thread(target=lambda c=c: [kept_of(tmp_path, content=c) for _ in range(20)]) for c in contents]
    for thread in threads:
        thread.start()
    seen = [load_record("key") for _ in range(50)]
    for thread in threads:
        thread.join()
    last = load_record("key")
    assert last is not None and last.content in contents and all(one is None or one.content in contents for one in seen)


def test_old_records_are_removed(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch_cache, "MAX_RECORDS", 3)
    for k in range(6):
        assert save_record(f"key{k}", b"", FileWatch(), {})
        os.utime(cache / f"key{k}", (k + 1, k + 1))
    assert sorted(path.name for path in cache.iterdir()) == ["key3", "key4", "key5"]
