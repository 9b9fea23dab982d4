"""The port in examples/ports/lightning: under any plan the job trains to the result of the original script."""

from pathlib import Path

import pytest
from ported import equal, first_epoch_is_the_same
from rarely import rarely


@pytest.mark.slow
def test_it_trains_what_the_script_trains(tmp_path: Path) -> None:
    first_epoch_is_the_same("lightning", "fsdp=2", seed=0, samples=96, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["dp=2 microbatches=2", *rarely("tp=2", "pp=2")])
def test_it_is_equal_to_one_device(plan: str, tmp_path: Path) -> None:
    equal("lightning", plan, tmp_path)
