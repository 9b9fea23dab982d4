"""Orders of an epoch, for `Job.order`: sequential, weighted, mixed, grouped by length, easiest first.

>>> plait.Job(..., order=plait.orders.length_grouped(lengths, batch=32))          # doctest: +SKIP

Each is a function of (seed, epoch, length of the data) to indices. Its random numbers are keyed by seed and epoch, so every rank and
every resumed run has the same order.
"""

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator, Philox
from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.data.sampling import Order, epoch_order
from plait.randomness.keyed import make_permutation, make_philox_key

Row = Sequence[float] | np.ndarray | Tensor
"""A number for each sample of the data."""


def sequential(seed: int, epoch: int, length: int) -> np.ndarray:
    """Order of the data itself, as in `torch.utils.data.SequentialSampler`."""
    return np.arange(length)


def weighted(weights: Row, samples: int | None = None) -> Order:
    """Samples drawn with replacement in proportion to weights, as in `torch.utils.data.WeightedRandomSampler`.

    `weights`: one number ≥ 0 for each sample of the data, of any sum. `samples`: length of an epoch (None: that of the data).

    """
    share = _to_array("weighted(weights)", weights)
    if samples is not None:
        _check_positive_int("weighted(samples)", samples)
    if not share.sum() > 0:
        raise _j027_error("weighted(weights)", "they sum to nothing")

    def order(seed: int, epoch: int, length: int) -> np.ndarray:
        upto = np.cumsum(_check_length(share, length, "weighted(weights)"))
        drawn = _make_generator(seed, epoch, "weighted").random(samples or length) * upto[-1]
        return np.minimum(np.searchsorted(upto, drawn, side="right"), int(np.flatnonzero(np.diff(upto, prepend=0))[-1]))

    return order


def mixed(sizes: Sequence[int], shares: Sequence[float], samples: int | None = None) -> Order:
    """Concatenated data sets (`torch.utils.data.ConcatDataset`), mixed by shares.

    `sizes`: samples of each data set; `shares`: fraction of each in an epoch, of any sum; `samples`: length of an epoch (None: that of the
    data). Each data set gives its samples in consecutive permutations, also across epochs. So all samples of a data set are equally
    frequent.

    """
    share = _to_array("mixed(shares)", shares)
    if len(sizes) != len(share) or not share.sum() > 0 or not all(_is_positive_int(size) for size in sizes):
        told = f"sizes are {list(sizes)} and shares {list(shares)}"
        raise _j027_error(
            "mixed(sizes, shares)", f"{told}: there is one of both for each data set, and shares sum to more than 0"
        )

    def order(seed: int, epoch: int, length: int) -> np.ndarray:
        if sum(sizes) != length:
            raise _j027_error("mixed(sizes)", f"they sum to {sum(sizes)}, and the data has {length} samples")
        parts, first = [], 0
        for k, (size, count) in enumerate(zip(sizes, _split_count(samples or length, share))):
            places = np.arange(epoch * count, (epoch + 1) * count)
            for turn in dict.fromkeys((places // size).tolist()):
                inside = _make_generator(seed, turn, f"mixed {k}").permutation(size)
                parts.append(first + inside[places[places // size == turn] % size])
            first += size
        together = np.concatenate(parts)
        return together[make_permutation(seed, epoch, len(together))]

    return order


def length_grouped(lengths: Row, batch: int, mega: int | None = None) -> Order:
    """Samples grouped by similar length to reduce padding, as `group_by_length` of the transformers Trainer.

    A permutation is divided into blocks of `mega` × `batch` samples, and each is sorted, the longest first. `lengths`: tokens of each
    sample; `batch`: samples of a step; `mega`: None for the Trainer's value, a quarter of the data's batches, at most 50. The longest
    sample of all is in the first step, so running out of memory happens at once.

    """
    tokens = _to_array("length_grouped(lengths)", lengths)
    _check_positive_int("length_grouped(batch)", batch)
    if mega is not None:
        _check_positive_int("length_grouped(mega)", mega)

    def order(seed: int, epoch: int, length: int) -> np.ndarray:
        known, shuffled = _check_length(tokens, length, "length_grouped(lengths)"), make_permutation(seed, epoch, length)
        stretch = (mega or max(1, min(length // (4 * batch), 50))) * batch
        cuts = [shuffled[i : i + stretch] for i in range(0, length, stretch)]
        cuts = [cut[np.argsort(-known[cut], kind="stable")] for cut in cuts]
        longest = max(range(len(cuts)), key=lambda k: known[cuts[k][0]])
        cuts[0][0], cuts[longest][0] = cuts[longest][0], cuts[0][0]
        return np.concatenate(cuts)

    return order


def curriculum(scores: Row, epochs: int, start: float = 0.2) -> Order:
    """Easy samples first: an epoch is a permutation of the easiest samples, and from epoch `epochs` on of all.

    `scores`: difficulty of each sample, the lowest the easiest. The first epoch has the fraction `start` of the data, and each
    later one more of it, in equal steps (the linear competence of Platanios et al. 2019, arXiv:1903.09848).

    """
    hard = _to_array("curriculum(scores)", scores, least=-np.inf)
    _check_positive_int("curriculum(epochs)", epochs)
    if not 0 < start <= 1:
        raise _j027_error("curriculum(start)", f"it is {start}, no part of the data: a number above 0 and at most 1")

    def order(seed: int, epoch: int, length: int) -> np.ndarray:
        part = start + (1 - start) * min(1.0, epoch / epochs)
        count = max(1, round(part * length))
        easiest = np.argsort(_check_length(hard, length, "curriculum(scores)"), kind="stable")[:count]
        return easiest[make_permutation(seed, epoch, count)]

    return order


def drop_last(batch: int, order: Order | None = None) -> Order:
    """An order (None: a permutation) without the short last batch of an epoch, as `DataLoader(drop_last=True)`.

    `batch`: samples of a step. Data with fewer samples is kept as one batch.

    """
    _check_positive_int("drop_last(batch)", batch)

    def drop_rest(seed: int, epoch: int, length: int) -> np.ndarray:
        whole = epoch_order(order, seed, epoch, length)
        return whole[: len(whole) // batch * batch or len(whole)]

    return drop_rest


def _make_generator(seed: int, epoch: int, word: str) -> Generator:
    return Generator(Philox(key=make_philox_key(seed, word, epoch)))


def _split_count(count: int, shares: np.ndarray) -> list[int]:
    """Split `count` in proportion to `shares` by largest remainder."""
    exact = shares / shares.sum() * count
    found = np.floor(exact).astype(int)
    for k in np.argsort(found - exact, kind="stable")[: count - found.sum()]:
        found[k] += 1
    return found.tolist()


def _to_array(name: str, values: object, least: float = 0.0) -> np.ndarray:
    """Return the numbers as an array, one for each sample. J027."""
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise _j027_error(name, f"it is a {type(values).__name__}, not a sequence of numbers") from None
    if found.ndim != 1 or not len(found) or not np.isfinite(found).all() or found.min() < least:
        raise _j027_error(name, f"its shape is {list(found.shape)}; expected one dim of finite numbers" + " ≥ 0" * (least == 0))
    return found


def _check_length(row: np.ndarray, length: int, name: str) -> np.ndarray:
    if len(row) != length:
        raise _j027_error(name, f"it has {len(row)} entries, and the data has {length} samples")
    return row


def _is_positive_int(value: object) -> bool:
    return type(value) is int and value >= 1


def _check_positive_int(name: str, value: object) -> None:
    if not _is_positive_int(value):
        raise _j027_error(name, f"it is {value!r}, not a whole number ≥ 1")


def _j027_error(name: str, why: str) -> PlaitError:
    return PlaitError(Problem("J027", f"plait.orders.{name} does not fit the data", why=why, where="Job(order=…)"))
