"""Small models have small units, which would all be gathered with the root. In these tests each unit is a group of its own."""

from typing import Any

import pytest
from rehearsed import rehearse

from plait.parallel.fsdp import groups
from plait.proof import full_batch, verify
from plait.proof.scenario import Scenario


@pytest.fixture(autouse=True)
def units_are_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUP_BYTES", 0)
    monkeypatch.setattr(groups, "TINY_BYTES", 0)


@pytest.fixture(autouse=True)
def operations_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = verify._train_reference

    def known(scenario: Scenario, own_size: bool) -> Any:
        rehearse(scenario.job)
        return plain(scenario, own_size)

    monkeypatch.setattr(verify, "_train_reference", known)


@pytest.fixture(autouse=True)
def logic_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The long lists test whether a plan's logic is exact. Tests with the mark `messages` check the messages against a dry run. Tests with
    the mark `whole` also prove batches of the job's own size, and its number formats. `make prove` does all of it."""
    if "not prove" not in request.config.option.markexpr or request.node.get_closest_marker("whole"):
        return
    monkeypatch.setattr(full_batch, "DEFAULT_SECONDS", 0.0)
    if not request.node.get_closest_marker("messages"):
        monkeypatch.setattr(verify, "_run_dry", lambda *_: "left out of this list")
