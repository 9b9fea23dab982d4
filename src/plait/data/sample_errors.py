"""What reading a sample raises, with the sample's number: C014."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from plait.config.errors import FAILED, PlaitError, Problem
from plait.data.batch import pair_of
from plait.launch.failures import described, located, titled

SHOWN = 8
"""Numbers of samples that a message shows."""


@contextmanager
def naming_samples(numbers: Sequence[int], when: str, samples: Sequence[object] = ()) -> Iterator[None]:
    """Whatever the job's data raises inside names these samples. `when`: the epoch or the data set, in words. `samples`: those that
    are put together inside. A lack of memory, files or loader processes stays what it is."""
    try:
        yield
    except PlaitError as error:
        if not samples or error.codes[0] != "J007":
            raise
        first, *rest = error.problems
        odd = [n for n, sample in zip(numbers, samples) if pair_of(sample) is None] or list(numbers)
        raise PlaitError(
            [replace(first, where=f"{_named(odd)} {when}"), *rest], error.exit_code, error.trace
        ) from error
    except (Exception, SystemExit) as error:
        told = described(error)
        if told["sort"]:
            raise
        what = f"{_named(numbers)} {when} raised {titled(told)}"
        fix = ("mend the data, or leave these samples out of it", "--resume    goes on from the last checkpoint")
        why = (
            "the job's data raised it while the sample was read"
            if not samples
            else "the job's data raised it while they were put together"
        )
        raise PlaitError(Problem("C014", what, why=why, where=located(told), fix=fix), FAILED, told["trace"]) from error


def _named(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN])) + (", …" if len(numbers) > SHOWN else "")
    return f"sample{'s' if len(numbers) > 1 else ''} {shown}"
