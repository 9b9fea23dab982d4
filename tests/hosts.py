"""Two hosts on one machine (`plait.chaos.hosts`). If the kernel allows no network namespaces, both are this machine."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from plait.chaos.hosts import Host, Hosts, make_two_hosts


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Yield the hosts for a test. A host without a namespace is this machine."""
    with ExitStack() as stack:
        try:
            pair = stack.enter_context(make_two_hosts())
        except OSError:
            pair = Host("127.0.0.1"), Host("127.0.0.1")
        yield pair
