"""Commands are forked from this process, so their imports happen in it once."""

from collections.abc import Iterator

import pytest
import training
from launched import end_all
from rehearsed import rehearse

from plait.launch import fork


@pytest.fixture(autouse=True)
def commands_end_with_their_test() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(scope="session", autouse=True)
def commands_start_warm() -> None:
    fork.run_ranks(lambda place: {}, 1)
    rehearse(training.job())
