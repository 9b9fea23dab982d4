"""Small models have small units, which would all be gathered with the root: here each is a group of its own."""

from typing import Any

import pytest
from rehearsed import rehearse

from plait import gathering, verify
from plait.job import Job


@pytest.fixture(autouse=True)
def units_are_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "GROUP_BYTES", 0)
    monkeypatch.setattr(gathering, "TINY", 0)


@pytest.fixture(autouse=True)
def operations_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = verify._reference

    def known(job: Job, *rest: Any) -> Any:
        rehearse(job)
        return plain(job, *rest)

    monkeypatch.setattr(verify, "_reference", known)
