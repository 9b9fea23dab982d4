"""Small models have small units, which would all be gathered with the root: here each is a group of its own."""

import pytest

from plait import gathering


@pytest.fixture(autouse=True)
def units_are_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "GROUP_BYTES", 0)
    monkeypatch.setattr(gathering, "TINY", 0)
