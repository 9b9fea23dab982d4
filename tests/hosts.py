"""Two hosts on one machine (`plait.chaos.hosts`), or twice this one where the kernel allows no network namespaces."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from plait.chaos.hosts import Host, Hosts, two_hosts


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """For a test; a host without a namespace is this machine."""
    with ExitStack() as stack:
        try:
            pair = stack.enter_context(two_hosts())
        except OSError:
            pair = Host("127.0.0.1"), Host("127.0.0.1")
        yield pair
