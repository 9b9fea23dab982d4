"""The samples of each step for data with access by index: the order of an epoch, split into steps.

The order is a permutation keyed by (seed, epoch), or the result of `Job.order`. It may repeat or omit samples, so an epoch may be longer or
shorter than the data. A step takes the next `Job.batch` samples. With `Job.token_budget` it takes samples as long as they fit the
budget, and at least one. The size of a step depends only on its start in the epoch, so a resumed run has the same steps under every plan.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.config.errors import PlaitError, Problem, summarize_error
from plait.config.job import Job, TokenBudget, find_user_line
from plait.data import loaders
from plait.data.batch import Data, MapStyle, is_map, open_data
from plait.data.batch import open_first_sample as first_of
from plait.data.iterables import gather_int_rows
from plait.randomness.keyed import make_permutation, preserve_host_state, seed_host

Order = Callable[[int, int, int], Any]
"""(seed, epoch, length of the data) -> the indices of an epoch's samples."""
ORDER = "Job(order=…)"
LENGTHS = "TokenBudget(lengths=…)"


def epoch_order(order: Order | None, seed: int, epoch: int, length: int) -> np.ndarray:
    """Return the indices of an epoch's samples in order, as integers of shape [samples of the epoch].

    `order`: `Job.order`; None: a permutation. Python's, numpy's and torch's generators are seeded by (seed, epoch) during the call and
    restored afterwards. J027 for invalid indices.

    """
    if order is None:
        return make_permutation(seed, epoch, length)
    try:
        with preserve_host_state():
            seed_host(seed, "order", epoch)
            returned = order(seed, epoch, length)
            found = _to_array(returned)
    except PlaitError:
        raise
    except Exception as error:  # an error of the user's code
        what = f"Job.order({seed}, {epoch}, {length}) raised {summarize_error(error)}"
        why = "plait calls it with the seed, the epoch number and the length of the data"
        raise PlaitError(Problem("J027", what, why=why, where=find_user_line(error) or ORDER)) from error
    wrong = ""
    if found.ndim != 1 or found.dtype.kind not in "iu":
        wrong = f"it returned {_describe_array(returned, found)}, not a row of whole numbers"
    elif not len(found):
        wrong = "it returned no index"
    elif found.min() < 0 or found.max() >= length:
        wrong = f"it returned indices from {found.min()} to {found.max()}, and the data has {length} samples"
    if wrong:
        what = f"the order of epoch {epoch} is invalid for the data"
        fix = ("return indices from 0 to length − 1, such as  torch.randperm(length)",)
        raise PlaitError(Problem("J027", what, why=wrong, where=ORDER, fix=fix))
    return found.astype(np.int64)


def _to_array(returned: object) -> np.ndarray:
    return returned.detach().cpu().numpy() if isinstance(returned, Tensor) else np.asarray(returned)


def _describe_array(returned: object, found: np.ndarray) -> str:
    return f"a {type(returned).__name__} of {found.dtype} with shape {list(found.shape)}"


def token_lengths(budget: TokenBudget, length: int) -> np.ndarray:
    """Return the tokens of each sample of the data, of shape [length]. J028 for an invalid result of `TokenBudget.lengths`."""
    try:
        with preserve_host_state():
            returned = budget.lengths()
            found = _to_array(returned)
    except PlaitError:
        raise
    except Exception as error:  # an error of the user's code
        what = f"TokenBudget.lengths() raised {summarize_error(error)}"
        raise PlaitError(Problem("J028", what, where=find_user_line(error) or LENGTHS)) from error
    wrong = ""
    if found.ndim != 1 or found.dtype.kind not in "iu" or (len(found) and found.min() < 0):
        wrong = f"it returned {_describe_array(returned, found)}, not a row of whole numbers ≥ 0"
    elif len(found) != length:
        wrong = f"it returned {len(found)} lengths, and the data has {length} samples"
    if wrong:
        what = "the lengths of the token budget do not fit the data"
        fix = ("lengths=lambda: [len(tokens) for tokens in …]    one for each sample, by its index",)
        raise PlaitError(Problem("J028", what, why=wrong, where=LENGTHS, fix=fix))
    return found.astype(np.int64)


@dataclass
class Sampling:
    """The samples of each step. `length`: of the data; `batch`: maximum samples of a step."""

    length: int
    batch: int
    seed: int
    order: Order | None = None
    budget: TokenBudget | None = None
    _tokens: np.ndarray | None = field(default=None, repr=False)
    _cached_epoch: tuple[int, np.ndarray] | None = field(default=None, repr=False)

    @staticmethod
    def from_job(job: Job, length: int) -> "Sampling":
        """Return the sampling of a job whose data has this length."""
        return Sampling(length, job.batch, job.seed, job.order, job.token_budget)

    def epoch_indices(self, number: int) -> np.ndarray:
        """Return the indices of an epoch's samples, in order."""
        if self._cached_epoch is None or self._cached_epoch[0] != number:
            self._cached_epoch = number, epoch_order(self.order, self.seed, number, self.length)
        return self._cached_epoch[1]

    def step_size(self, number: int, start: int) -> int:
        """Return the number of samples of the step that starts at `start` of an epoch; 0 at its end."""
        ids = self.epoch_indices(number)[start : start + self.batch]
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

    def find_typical(self) -> int:
        """Return the index of a sample with 1/`batch` of the token budget, or of the longest sample if none is as long."""
        assert self.budget is not None
        tokens = token_lengths(self.budget, self.length)
        wanted = -(-self.budget.tokens // self.batch)
        longer = np.flatnonzero(tokens >= wanted)
        return int(longer[tokens[longer].argmin()]) if len(longer) else int(tokens.argmax())

    def digest(self) -> int:
        """Return a digest of the first epoch's order and the token lengths."""
        if self.budget is not None and self._tokens is None:
            self._tokens = token_lengths(self.budget, self.length)
        told = zlib.crc32(np.ascontiguousarray(self.epoch_indices(0)).tobytes())
        return told if self._tokens is None else zlib.crc32(self._tokens.tobytes(), told)


def check_same_order(job: Job, data: object, group: ProcessGroup | None) -> None:
    """J027 if ranks of the group have different orders or token lengths. Collective."""
    if group is None or not is_map(data) or (job.order is None and job.token_budget is None):
        return
    rows = gather_int_rows([Sampling.from_job(job, len(data)).digest()], group)
    other = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
    if other is not None:
        what = f"ranks 0 and {other} have different epoch orders or token lengths"
        why = "Job.order must be a function of (seed, epoch, length) alone, independent of rank and process"
        raise PlaitError(Problem("J027", what, why=why, where=ORDER))


class _SingleSample:
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


def open_sketch_data(job: Job, data: Data) -> Any:
    """Return the data for a sketch. With a token budget it is one sample with 1/`Job.batch` of the budget."""
    if job.token_budget is None or not is_map(data):
        return first_of(job.data, data)
    return _SingleSample(data, Sampling.from_job(job, len(data)).find_typical())


def open_job_data(job: Job) -> Any:
    """Open and check `Job.data`, with the job's loader, order and token budget. J007, J027, J028."""
    data = open_data(job.data)
    check_sampling(job, data)
    return data


def check_sampling(job: Job, data: object) -> None:
    """Reject a loader with other batches than the job, and an order or token budget that is invalid for this data."""
    loaders.check_loader(job, data)
    for name, code, given in (("order", "J027", job.order), ("token_budget", "J028", job.token_budget)):
        if given is not None and not is_map(data):
            what = f"Job({name}=…) needs data with access by index, and this is a {type(data).__name__}"
            why = "an iterable has its own order of samples"
            fix = ("order the samples in the iterable itself", "add  __len__ and __getitem__  to the data")
            raise PlaitError(Problem(code, what, why=why, where="Job(data=…)", fix=fix))
    if not is_map(data):
        return
    if job.token_budget is not None:
        token_lengths(job.token_budget, len(data))
    if job.order is not None:
        twice = [epoch_order(job.order, job.seed, 0, len(data)) for _ in range(2)]
        if not np.array_equal(twice[0], twice[1]):
            what = "Job.order returned different orders in two calls"
            why = "every rank and a resumed run call it again, so it must be a function of (seed, epoch, length) alone"
            fix = ("draw from torch.Generator().manual_seed(seed + epoch)", "numpy.random.default_rng([seed, epoch])")
            raise PlaitError(Problem("J027", what, why=why, where=ORDER, fix=fix))


def size_by_first_step(job: Job) -> Job:
    """Return the job without a token budget, with the batch size of its first step under that budget."""
    if job.token_budget is None or not is_map(data := open_data(job.data)):
        return job
    return replace(job, batch=Sampling.from_job(job, len(data)).step_size(0, 0), token_budget=None)
