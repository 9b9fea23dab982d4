"""Which samples each step takes, of data that is read by index: the order of an epoch, cut into steps.

The order is a permutation keyed by (seed, epoch), or what `Job.order` returns: it may repeat samples or leave some out, so an epoch
may be longer or shorter than the data. A step takes the next `Job.batch` samples of it. With `Job.token_budget` it takes them as
long as they fit the budget, and at least one. The size of a step is a function of where it begins in the epoch, so a run that is
resumed goes on with the same steps, under every plan.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.config.errors import PlaitError, Problem, in_a_line
from plait.config.job import Job, TokenBudget, user_line
from plait.data import loaders
from plait.data.batch import Data, MapStyle, is_map, opened
from plait.data.batch import example as first_of
from plait.data.iterables import rows_of_ranks
from plait.randomness.keyed import host_kept, permutation, seed_host

Order = Callable[[int, int, int], Any]
"""(seed, epoch, length of the data) -> the indices of an epoch's samples."""
ORDER = "Job(order=…)"
LENGTHS = "TokenBudget(lengths=…)"


def epoch_order(order: Order | None, seed: int, epoch: int, length: int) -> np.ndarray:
    """The indices of an epoch's samples in order, as whole numbers of shape [samples of the epoch].

    `order` is `Job.order`; None: a permutation. Python's, numpy's and torch's generators are seeded by (seed, epoch) while it
    runs, and are afterwards as they were. J027 when it returns no such indices.
    """
    if order is None:
        return permutation(seed, epoch, length)
    try:
        with host_kept():
            seed_host(seed, "order", epoch)
            returned = order(seed, epoch, length)
            found = _numbers(returned)
    except PlaitError:
        raise
    except Exception as error:  # it is the user's code
        what = f"Job.order({seed}, {epoch}, {length}) raised {in_a_line(error)}"
        why = "plait calls it with the seed, the number of the epoch and the length of the data"
        raise PlaitError(Problem("J027", what, why=why, where=user_line(error) or ORDER)) from error
    wrong = ""
    if found.ndim != 1 or found.dtype.kind not in "iu":
        wrong = f"it returned {_shown(returned, found)}, not a row of whole numbers"
    elif not len(found):
        wrong = "it returned no index"
    elif found.min() < 0 or found.max() >= length:
        wrong = f"it returned indices from {found.min()} to {found.max()}, and the data has {length} samples"
    if wrong:
        what = f"the order of epoch {epoch} is not one of samples of the data"
        fix = ("return indices from 0 to length − 1, such as  torch.randperm(length)",)
        raise PlaitError(Problem("J027", what, why=wrong, where=ORDER, fix=fix))
    return found.astype(np.int64)


def _numbers(returned: object) -> np.ndarray:
    return returned.detach().cpu().numpy() if isinstance(returned, Tensor) else np.asarray(returned)


def _shown(returned: object, found: np.ndarray) -> str:
    return f"a {type(returned).__name__} of {found.dtype} with shape {list(found.shape)}"


def token_lengths(budget: TokenBudget, length: int) -> np.ndarray:
    """The tokens of each sample of the data, of shape [length]. J028 when `TokenBudget.lengths` returns something else."""
    try:
        with host_kept():
            returned = budget.lengths()
            found = _numbers(returned)
    except PlaitError:
        raise
    except Exception as error:  # it is the user's code
        what = f"TokenBudget.lengths() raised {in_a_line(error)}"
        raise PlaitError(Problem("J028", what, where=user_line(error) or LENGTHS)) from error
    wrong = ""
    if found.ndim != 1 or found.dtype.kind not in "iu" or (len(found) and found.min() < 0):
        wrong = f"it returned {_shown(returned, found)}, not a row of whole numbers ≥ 0"
    elif len(found) != length:
        wrong = f"it returned {len(found)} lengths, and the data has {length} samples"
    if wrong:
        what = "the lengths of a token budget are not those of the data"
        fix = ("lengths=lambda: [len(tokens) for tokens in …]    one for each sample, by its index",)
        raise PlaitError(Problem("J028", what, why=wrong, where=LENGTHS, fix=fix))
    return found.astype(np.int64)


@dataclass
class Sampling:
    """Which samples each step takes. `length`: of the data; `batch`: the most samples of a step."""

    length: int
    batch: int
    seed: int
    order: Order | None = None
    budget: TokenBudget | None = None
    _tokens: np.ndarray | None = field(default=None, repr=False)
    _known: tuple[int, np.ndarray] | None = field(default=None, repr=False)

    @staticmethod
    def of(job: Job, length: int) -> "Sampling":
        """The sampling of a job whose data has this length."""
        return Sampling(length, job.batch, job.seed, job.order, job.token_budget)

    def epoch(self, number: int) -> np.ndarray:
        """The indices of an epoch's samples, in order."""
        if self._known is None or self._known[0] != number:
            self._known = number, epoch_order(self.order, self.seed, number, self.length)
        return self._known[1]

    def size(self, number: int, start: int) -> int:
        """Samples of the step that begins at place `start` of an epoch; 0 at its end."""
        ids = self.epoch(number)[start : start + self.batch]
        if self.budget is None or not len(ids):
            return len(ids)
        if self._tokens is None:
            self._tokens = token_lengths(self.budget, self.length)
        tokens = self._tokens[ids]
        if self.budget.padded:
            taken = np.maximum.accumulate(tokens) * np.arange(1, len(ids) + 1)
        else:
            taken = np.cumsum(tokens)
        return max(1, int(np.searchsorted(taken, self.budget.tokens, side="right")))

    def typical(self) -> int:
        """Index of a sample of which `batch` take about the whole budget, or of the longest where none is as long."""
        assert self.budget is not None
        tokens = token_lengths(self.budget, self.length)
        wanted = -(-self.budget.tokens // self.batch)
        longer = np.flatnonzero(tokens >= wanted)
        return int(longer[tokens[longer].argmin()]) if len(longer) else int(tokens.argmax())

    def digest(self) -> int:
        """A number that tells the order of the first epoch, and the lengths that steps go by."""
        if self.budget is not None and self._tokens is None:
            self._tokens = token_lengths(self.budget, self.length)
        told = zlib.crc32(np.ascontiguousarray(self.epoch(0)).tobytes())
        return told if self._tokens is None else zlib.crc32(self._tokens.tobytes(), told)


def agreed(job: Job, data: object, group: ProcessGroup | None) -> None:
    """J027 when ranks of the group have other orders, or other lengths of samples; all ranks call it."""
    if group is None or not is_map(data) or (job.order is None and job.token_budget is None):
        return
    rows = rows_of_ranks([Sampling.of(job, len(data)).digest()], group)
    other = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
    if other is not None:
        what = f"ranks 0 and {other} have different orders of an epoch, or lengths of samples"
        why = "Job.order is a function of (seed, epoch, length) alone: nothing may depend on the rank or the process"
        raise PlaitError(Problem("J027", what, why=why, where=ORDER))


class _One:
    """One sample of a data set, as a data set."""

    def __init__(self, data: MapStyle, number: int):
        self.data, self.number = data, number
        for name in ("collate", "sketched_beside"):
            if hasattr(data, name):
                setattr(self, name, getattr(data, name))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> object:
        return self.data[self.number]


def example(job: Job, data: Data) -> Any:
    """What a sketch reads samples of: under a token budget one of which `Job.batch` take about the whole budget."""
    if job.token_budget is None or not is_map(data):
        return first_of(job.data, data)
    return _One(data, Sampling.of(job, len(data)).typical())


def data_of(job: Job) -> Any:
    """What `Job.data` gives, when the job can have it: a loader, an order and a token budget are checked. J007, J027, J028."""
    data = opened(job.data)
    check(job, data)
    return data


def check(job: Job, data: object) -> None:
    """Refuse a loader that makes other batches than the job, and an order or a token budget that this data cannot have."""
    loaders.check(job, data)
    for name, code, given in (("order", "J027", job.order), ("token_budget", "J028", job.token_budget)):
        if given is not None and not is_map(data):
            what = f"Job({name}=…) is for data that is read by index, and this is a {type(data).__name__}"
            why = "an iterable gives its samples in its own order, and one after the other"
            fix = ("order the samples in the iterable itself", "give the data  __len__ and __getitem__")
            raise PlaitError(Problem(code, what, why=why, where="Job(data=…)", fix=fix))
    if not is_map(data):
        return
    if job.token_budget is not None:
        token_lengths(job.token_budget, len(data))
    if job.order is not None:
        twice = [epoch_order(job.order, job.seed, 0, len(data)) for _ in range(2)]
        if not np.array_equal(twice[0], twice[1]):
            what = "Job.order returned another order when it was called again"
            why = "a run that is resumed, and every rank, asks for it again: it is a function of (seed, epoch, length) alone"
            fix = ("draw from torch.Generator().manual_seed(seed + epoch)", "numpy.random.default_rng([seed, epoch])")
            raise PlaitError(Problem("J027", what, why=why, where=ORDER, fix=fix))


def as_first_step(job: Job) -> Job:
    """The job with batches as large as its first step, as far as a token budget decides that, and no budget."""
    if job.token_budget is None or not is_map(data := opened(job.data)):
        return job
    return replace(job, batch=Sampling.of(job, len(data)).size(0, 0), token_budget=None)
