"""plait from Python: the results and errors of the functions, and the process state afterwards, which must be unchanged."""

import dataclasses
import faulthandler
import importlib
import json
import math
import os
import pkgutil
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rarely import rarely
from torch import nn
from torch.nn.functional import mse_loss
from training import job as job_of_file

import plait
from plait import api
from plait.config.errors import PlaitError, Problem
from plait.launch import fork
from plait.launch.failures import unforkable

FILE = str(Path(__file__).parents[1] / "training.py")


class Waves:
    def __len__(self) -> int:
        return 96

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([6.0 * i / 96 - 3.0])
        return x, x.sin()


class Tied(nn.Module):
    """Two layers that share a weight, and a buffer that training changes."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(1, 8), nn.BatchNorm1d(8)
        self.inner, self.again, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.again.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.again(torch.tanh(self.inner(self.norm(self.first(x))))))


def small(steps: int = 6, lr: float = 1e-2, pause: float = 0.0) -> plait.Job:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        time.sleep(pause)
        return mse_loss(outputs, targets)

    return plait.Job(
        model=lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), loss=loss, data=Waves,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=lr), batch=12, steps=steps,
        evaluate=plait.Evaluate(Waves, lambda outputs, targets: {"error": (outputs - targets).abs().squeeze(-1)}, every=3),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(call: Callable[[], object]) -> list[str]:
    with pytest.raises(PlaitError) as raised:
        call()
    return raised.value.codes


def test_a_run_is_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    run = plait.train(small, nproc=2, save_every=4, keep=1)
    assert (run.path, run.stopped, run.steps) == (Path("runs/small-1"), False, 6)
    assert len(run.losses) == 6 and run.loss == run.losses[-1] == run.metrics[-1]["loss"]
    assert run.checkpoint == Path("runs/small-1/checkpoints/step-000006")
    assert [row["step"] for row in run.evaluations] == [3, 6] and set(run.evaluations[0]) == {"step", "error"}
    assert all(isinstance(value, (int, float, bool, type(None))) for row in run.metrics for value in row.values())
    assert "done  6 steps" in capsys.readouterr().out and "steps       6" in run.report()
    page = run._repr_html_()
    assert page.count("<svg") == 2 and "evaluation: error" in page
    assert "<svg" in run.timeline()._repr_html_()
    frames = pytest.importorskip("pandas")
    assert list(frames.DataFrame(run.metrics).loss) == run.losses
    assert plait.Run.open("runs/latest").path == run.path


@pytest.mark.slow
def test_the_job_comes_in_any_form_and_plans_agree(capsys: pytest.CaptureFixture[str]) -> None:
    one = plait.train(small(steps=4), quiet=True)
    two = plait.train(small, "fsdp=2", arguments={"steps": 4}, name="other name", quiet=True)
    three = plait.train(f"{FILE}:job", plait.Plan.parse("dp=2"), steps=2, quiet=True)
    assert capsys.readouterr().out == ""
    assert two.path.name == "other-name-1" and three.steps == 2 and three.path.name == "training-1"
    assert one.losses == pytest.approx(two.losses, rel=1e-5)
    assert plait.Run.open(three.path).model().state_dict().keys() == job_of_file().model().state_dict().keys()
    assert refused(plait.Run.open(two.path).model) == ["U023"]


@pytest.mark.slow
def test_the_model_has_the_trained_weights() -> None:
    job = dataclasses.replace(small(), model=Tied)
    run, again = plait.train(job, quiet=True), plait.train(job, "fsdp=2", quiet=True, allow_inexact=True)
    before = torch.random.get_rng_state()
    model, inputs = run.model(), torch.stack([Waves()[i][0] for i in range(96)])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.again.weight is model.inner.weight and not model.training
    with torch.no_grad():
        error = (model(inputs) - inputs.sin()).abs().mean().item()
    assert error == pytest.approx(run.evaluations[-1]["error"], rel=1e-5)
    assert again.model(job).norm.num_batches_tracked == 6
    assert refused(lambda: again.model(small())) == ["K008", "K008"]


@pytest.mark.slow
def test_a_run_goes_on_under_another_plan() -> None:
    whole = plait.train(small, quiet=True)
    part = plait.train(small, steps=3, nproc=2, quiet=True)
    rest = plait.train(small, "fsdp=2", resume=part.path, quiet=True)
    assert rest.path == part.path and rest.losses == pytest.approx(whole.losses, rel=1e-5)


@pytest.mark.slow
def test_verify_plan_and_sketch_return_what_the_commands_print() -> None:
    verdict = plait.verify(small, "dp=2", steps=3)
    assert verdict.equal and "EQUAL" in repr(verdict) and verdict.to_dict()["equal"] and verdict.job == "small"
    found = plait.plan(small, "h100x8", top=2)
    assert plait.Plan.parse(found.best or "") and found.facts["devices"] == 8 and "choice" in repr(found)
    table = plait.sketch(small, batch=4, plan="dp=2")
    assert table.facts["parameters"] == 25 and table.facts["batch"] == 4 and "memory" in table.facts
    assert str(table).startswith("job     small")


def test_a_wrong_verdict_is_a_value() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mse_loss(outputs, targets) * len(targets)

    verdict = plait.verify(dataclasses.replace(small(), loss=loss))
    assert not verdict.equal and verdict.code and verdict.code in repr(verdict)


@pytest.mark.parametrize(
    ("call", "codes"),
    [
        (lambda: plait.train(small, stepz=3), ["U020"]),
        (lambda: plait.train(small, seed=3), ["U020"]),
        (lambda: plait.train(small, nnodes=2), ["U020"]),
        (lambda: plait.train(small, steps="3", save_every=0.5, allow_shrink=1), ["U002"] * 3),
        (lambda: plait.train(small, steps=True), ["U002"]),
        (lambda: plait.train(small, on_nan="go"), ["U002"]),
        (lambda: plait.train(small, keep=0, nproc=0), ["U002"] * 2),
        (lambda: plait.train(small, tracker=["nowhere"]), ["U002"]),
        (lambda: plait.train(small, log_ranks=[0, 1]), ["U002"]),
        (lambda: plait.train(small, "dp=2 pp"), ["T002"]),
        (lambda: plait.train(7), ["U020"]),  # type: ignore[arg-type]
        (lambda: plait.train(small(), arguments={"steps": 3}), ["U020"]),
        (lambda: plait.train(small, arguments={"depth": 3}), ["J003"]),
        (lambda: plait.train(lambda: 7), ["J003"]),  # type: ignore[arg-type, return-value]
        (lambda: plait.train("nowhere.py"), ["J001"]),
        (lambda: plait.train(small, resume="nowhere"), ["K001"]),
        (lambda: plait.verify(small, steps=2), ["U002"]),
        (lambda: plait.plan(small, objective="max-batch"), ["U020"]),
        (lambda: plait.plan(small, gpus=0), ["U002"]),
        (lambda: plait.sketch(small, batch=0), ["U002"]),
        (lambda: plait.Run.open("runs/nowhere"), ["R003"]),
    ],
)
def test_what_is_wrong_is_refused(call: Callable[[], object], codes: list[str]) -> None:
    assert refused(call) == codes
    assert not Path("runs").exists()


@pytest.mark.slow
def test_afterwards_the_process_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    process, numbers = psutil.Process(), (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def facts() -> tuple[object, ...]:
        threads = torch.get_num_threads(), threading.active_count(), process.num_threads()
        handlers = [signal.getsignal(number) for number in numbers]
        random = hash(torch.random.get_rng_state().numpy().tobytes())
        return threads, handlers, random, process.num_fds(), process.children(), faulthandler.is_enabled()

    plait.train(small, nproc=2, quiet=True)  # imported and opened once
    before = facts()
    plait.train(small, nproc=2, quiet=True)
    assert refused(lambda: plait.train(dataclasses.replace(small(), data=lambda: 7), nproc=2, quiet=True))
    plait.plan(small, gpus=2)
    assert facts() == before


def test_threads_that_computed_before_do_not_stop_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of OpenMP do not exist in a forked child, so a child that waits for them hangs."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        torch.randn(4_000_000).exp().sum()
        assert fork.run_ranks(lambda place: {"sum": torch.ones(4_000_000).sum().item()}, 1, hang_timeout=10) == [{"sum": 4e6}]
    finally:
        torch.set_num_threads(before)


def stop_when(there: Callable[[], bool]) -> threading.Thread:
    """Sends Ctrl-C to this process once `there` returns True."""

    def wait() -> None:
        for _ in range(3000):
            if there():
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.02)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def rows(run: str) -> int:
    file = Path("runs", run, "metrics.jsonl")
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("fresh", [False, *rarely(True)])
def test_ctrl_c_stops_saves_and_returns(fresh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: fresh)
    whole = plait.train(small(steps=4), name="whole", quiet=True)
    handler = signal.getsignal(signal.SIGINT)
    stopper = stop_when(lambda: rows("slow-1") >= 2)
    run = plait.train(small(steps=1000, pause=0.1), nproc=2, name="slow", quiet=True)
    stopper.join()
    assert run.stopped and 2 <= run.steps < 1000 and run.checkpoint is not None
    assert signal.getsignal(signal.SIGINT) is handler
    assert run.losses[:2] == pytest.approx(whole.losses[:2], rel=1e-5)


def test_another_thread_trains_without_hearing_signals(capsys: pytest.CaptureFixture[str]) -> None:
    found, handler = list[plait.Run](), signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: found.append(plait.train(small, nproc=2)))
    thread.start()
    thread.join()
    assert found[0].steps == 6 and signal.getsignal(signal.SIGTERM) is handler
    assert "outside of the main thread" in capsys.readouterr().out


def test_ranks_print_into_their_logs_and_the_first_one_here(capsys: pytest.CaptureFixture[str]) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        print("said by a rank")
        return mse_loss(outputs, targets)

    plait.train(dataclasses.replace(small(steps=2), loss=loss), nproc=2, check="none")
    assert 0 < capsys.readouterr().out.count("said by a rank") <= 2  # twice as many if rank 1 printed too
    assert Path("runs/latest/logs/rank1.log").read_text().count("said by a rank") == 2


def test_what_ranks_raise_is_raised_here() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise ValueError("no loss today")

    with pytest.raises(PlaitError, match="ValueError: no loss today") as raised:
        plait.train(dataclasses.replace(small(), loss=loss), nproc=2, quiet=True, check="none")
    shown = raised.value._render_traceback_()
    assert shown[0].startswith("error[C005]") and len(shown) < 10 and not list(Path("runs").glob("small*"))


class TestFresh:
    """If CUDA is in use, ranks start from a fresh process."""

    @pytest.fixture(autouse=True)
    def in_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    @pytest.mark.slow
    def test_a_job_by_value_trains_as_it_does_here(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = plait.train(small, nproc=2)
        out = capsys.readouterr().out
        assert out.startswith(api.FRESH_NOTE) and "plait 0.1.0 · small · dp=2" in out and "done  6 steps" in out
        assert run.model().training is False and run.evaluations
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        assert plait.train(small, nproc=2, quiet=True).losses == run.losses

    @pytest.mark.slow
    def test_a_job_of_a_file_needs_no_cloudpickle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cloudpickle", None)
        assert plait.train(FILE, steps=2, quiet=True).steps == 2
        assert refused(lambda: plait.train(small, quiet=True)) == ["U021"]

    def test_what_cannot_travel_is_refused(self) -> None:
        lock = threading.Lock()
        job = dataclasses.replace(small(), weight=lambda targets: lock and targets)
        assert refused(lambda: plait.train(job, quiet=True)) == ["U021"]

    @pytest.mark.prove
    def test_a_verdict_travels(self) -> None:
        verdict = plait.verify(small, steps=3)
        assert verdict.equal and "EQUAL" in repr(verdict)
        json.dumps(verdict.to_dict())

    @pytest.mark.prove
    def test_errors_travel(self) -> None:
        assert refused(lambda: plait.train(small, "pp=2 tp=2", quiet=True))[0].startswith("P")
        assert refused(lambda: plait.train(dataclasses.replace(small(), loss=exits), quiet=True)) == ["C003"]


def exits(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    os._exit(7)


@pytest.mark.prove
def test_a_process_that_turns_out_to_be_unforkable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch does not report in advance that it has differentiated on a GPU. Ranks detect it."""

    def launch(*given: object, **named: object) -> None:
        raise PlaitError(Problem(**vars(unforkable("autograd has threads"))))

    monkeypatch.setattr(api, "launch_run", launch)
    assert plait.train(small, quiet=True).steps == 6


@pytest.mark.slow
def test_under_torchrun_it_joins_as_a_rank(folder: Path) -> None:
    script = folder / "script.py"
    lines = (
        "import sys, plait",
        f"sys.path.insert(0, {str(Path(FILE).parent)!r})",
        "from training import job",
        'run = plait.train(job, "dp=*", steps=2, check="none")',
        'print(f"run {run.path} {run.steps} {run.stopped}\\n", end="", flush=True)',
    )
    script.write_text("\n".join(lines), encoding="utf-8")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(start, capture_output=True, text=True, timeout=100)
    assert len(re.findall(r"run runs/\S+-1 2 False", done.stdout)) == 2, done.stdout + done.stderr
    assert len(list(Path("runs").glob("*-1"))) == 1 and "dp=2 on 2" in done.stdout


def test_losses_that_are_not_finite() -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mse_loss(outputs, targets) * (math.nan if bool((targets[0] > 0.99).any()) else 1.0)

    run = plait.train(dataclasses.replace(small(), loss=loss), on_nan="skip", quiet=True, check="none")
    assert run.steps == 6 and len(run.losses) == 6 and run._repr_html_()


def test_the_functions_keep_their_names() -> None:
    """No module of the package has the name of a public function, so importing a module hides no function."""
    names = {module.name for module in pkgutil.iter_modules(plait.__path__)}
    assert not names & {"train", "verify", "plan", "sketch", "Run"}
    for name in ("plait.config.plan", "plait.model.sketch", "plait.proof.verify", "plait.cli.train", "plait.cli.plan"):
        importlib.import_module(name)
    assert all(callable(getattr(plait, name)) for name in ("train", "verify", "plan", "sketch"))


class Counts(plait.Callback):
    def on_step(self, engine: Any, step: Any) -> None:
        engine.log("twice", 2.0 * step.step)
        if step.step == 3:
            engine.stop("three are enough")


def test_callbacks_are_values(tmp_path: Path) -> None:
    run = plait.train(small, nproc=2, steps=9, runs=tmp_path, quiet=True, callbacks=[Counts()])
    assert [row["logged/twice"] for row in run.metrics][:3] == [2.0, 4.0, 6.0] and len(run.losses) == 3
    with pytest.raises(plait.PlaitError, match="U011"):
        plait.train(small, nproc=2, runs=tmp_path, quiet=True, callbacks=[Counts])  # type: ignore[list-item]
