"""The ports of a stream and of token batches: trained on ranks, resumed under another plan, with the losses of the original script."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from launched import Command, rows
from rarely import sampled

from plait.config.job import load_job
from plait.config.plan import Plan
from plait.proof.verify import verify

PORTS = Path(__file__).parents[2] / "examples" / "ports"
NAMES = ("streaming", "token_budget")


@pytest.fixture(autouse=True)
def imports_are_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each port has a file called before.py, and later tests must not import one of them."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("before", None)
    yield
    sys.modules.pop("before", None)


def before(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("before", PORTS / name / "before.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["before"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name, first, then", sampled(2, [("streaming", "dp=2", "dp=3"), ("token_budget", "dp=2 microbatches=2", "dp=1")])
)
def test_a_port_stopped_and_resumed_has_the_losses_of_the_script(
    name: str, first: str, then: str, tmp_path: Path
) -> None:
    for plan, steps, more in ((first, "10", ()), (then, "24", ("--resume",))):
        argv = ("train", str(PORTS / name / "job.py"), "--plan", plan, "--steps", steps, *more)
        command = Command(*argv, folder=tmp_path)
        assert command.wait() == 0, command.output
    assert [row["loss"] for row in rows(tmp_path)] == pytest.approx(before(name).main(24), rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_port_is_proved(name: str) -> None:
    before(name)
    verdict = verify(load_job(str(PORTS / name / "job.py")), Plan.parse("dp=2 microbatches=2"))
    assert verdict.equal and not verdict.inexact, verdict.to_dict()
