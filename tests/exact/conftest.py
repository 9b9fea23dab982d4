"""Small models have small units, which would all be gathered with the root: here each is a group of its own."""

import pytest

from plait.strategies import shard


@pytest.fixture(autouse=True)
def units_are_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "GROUP_BYTES", 0)
