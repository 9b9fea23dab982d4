"""The port of dpo: the manual loop runs, and the job on two ranks equals one device."""

from pathlib import Path

import ports_phased
import pytest
from rarely import rarely


def test_the_loop_by_hand_runs(capsys: pytest.CaptureFixture[str]) -> None:
    ports_phased.by_hand("dpo", capsys)


@pytest.mark.slow
def test_the_job_trains(tmp_path: Path) -> None:
    ports_phased.trained("dpo", tmp_path)


@pytest.mark.parametrize("plan", ["dp=2", *rarely("fsdp=2", "tp=2", "pp=2")])
def test_the_job_equals_one_device(plan: str) -> None:
    ports_phased.equal("dpo", plan)
