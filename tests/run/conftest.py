"""Commands are forked from this process: what they need is imported in it, once."""

import pytest
import training
from rehearsed import rehearse

from plait.launch import fork


@pytest.fixture(scope="session", autouse=True)
def commands_start_warm() -> None:
    fork.run(lambda place: {}, 1)
    rehearse(training.job())
