"""Small models have small units, which would all be gathered with the root: here each is a group of its own."""

from typing import Any

import pytest
from rehearsed import rehearse

from plait.parallel.fsdp import groups
from plait.proof import own_batch, verify
from plait.proof.scenario import Scenario


@pytest.fixture(autouse=True)
def units_are_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUP_BYTES", 0)
    monkeypatch.setattr(groups, "TINY", 0)


@pytest.fixture(autouse=True)
def operations_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = verify._reference

    def known(scenario: Scenario, own_size: bool) -> Any:
        rehearse(scenario.job)
        return plain(scenario, own_size)

    monkeypatch.setattr(verify, "_reference", known)


@pytest.fixture(autouse=True)
def logic_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists ask whether a plan's logic is exact. What else a proof does is left to tests marked `messages` (what is sent, held
    against a dry run) and `whole` (that, batches of the job's own size, and its number formats), and done in all by `make prove`."""
    if "not prove" not in request.config.option.markexpr or request.node.get_closest_marker("whole"):
        return
    monkeypatch.setattr(own_batch, "SECONDS", 0.0)
    if not request.node.get_closest_marker("messages"):
        monkeypatch.setattr(verify, "_dry", lambda *_: "left out of this list")
