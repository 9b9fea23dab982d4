"""Orders of an epoch, for `Job.order`: in sequence, weighted, mixed by shares, grouped by length, easiest first.

>>> plait.Job(..., order=plait.orders.length_grouped(lengths, batch=32))          # doctest: +SKIP

Each is a function of (seed, epoch, length of the data) to indices, drawn from numbers keyed by seed and epoch, so every rank and
every resumed run has the same.
"""

from collections.abc import Sequence

import numpy as np
from numpy.random import Generator, Philox
from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.data.sampling import Order, epoch_order
from plait.randomness.keyed import key, permutation

Row = Sequence[float] | np.ndarray | Tensor
"""A number for each sample of the data."""


def sequential(seed: int, epoch: int, length: int) -> np.ndarray:
    """The samples as the data has them, as `torch.utils.data.SequentialSampler`."""
    return np.arange(length)


def weighted(weights: Row, samples: int | None = None) -> Order:
    """Samples drawn with replacement, each as often as its weight says, as `torch.utils.data.WeightedRandomSampler`.

    `weights`: one number ≥ 0 for each sample of the data, of any sum. `samples`: how many an epoch has (None: as many as the data).
    """
    share = _row("weighted(weights)", weights)
    if samples is not None:
        _count("weighted(samples)", samples)
    if not share.sum() > 0:
        raise _wrong("weighted(weights)", "they sum to nothing")

    def order(seed: int, epoch: int, length: int) -> np.ndarray:
        upto = np.cumsum(_of(share, length, "weighted(weights)"))
        drawn = _generator(seed, epoch, "weighted").random(samples or length) * upto[-1]
        return np.minimum(np.searchsorted(upto, drawn, side="right"), int(np.flatnonzero(np.diff(upto, prepend=0))[-1]))

    return order


def mixed(sizes: Sequence[int], shares: Sequence[float], samples: int | None = None) -> Order:
    """Several data sets one behind the other (`torch.utils.data.ConcatDataset`), mixed by shares.

    `sizes`: samples of each data set; `shares`: each one's part of an epoch, of any sum; `samples`: how many an epoch has (None:
    as many as the data). A data set gives its samples in permutations of its own, one after the other and across epochs, so each
    of them comes as often as any other of the same data set.
    """
    share = _row("mixed(shares)", shares)
    if len(sizes) != len(share) or not share.sum() > 0 or not all(_whole(size) for size in sizes):
        told = f"sizes are {list(sizes)} and shares {list(shares)}"
        raise _wrong(
            "mixed(sizes, shares)", f"{told}: there is one of both for each data set, and shares sum to more than 0"
        )

    def order(seed: int, epoch: int, length: int) -> np.ndarray:
        if sum(sizes) != length:
            raise _wrong("mixed(sizes)", f"they sum to {sum(sizes)}, and the data has {length} samples")
        parts, first = [], 0
        for k, (size, count) in enumerate(zip(sizes, _parts(samples or length, share))):
            places = np.arange(epoch * count, (epoch + 1) * count)
            for turn in dict.fromkeys((places // size).tolist()):
                inside = _generator(seed, turn, f"mixed {k}").permutation(size)
                parts.append(first + inside[places[places // size == turn] % size])
            first += size
        together = np.concatenate(parts)
        return together[permutation(seed, epoch, len(together))]

    return order


def length_grouped(lengths: Row, batch: int, mega: int | None = None) -> Order:
    """Samples of similar length beside each other, so that little is padded, as `group_by_length` of the Transformers' Trainer.

    A permutation is cut into stretches of `mega` × `batch` samples, and each is sorted, the longest first. `lengths`: tokens of each
    sample of the data; `batch`: samples of a step; `mega`: None as there, a quarter of the data's batches, at most 50. The longest
    sample of all is in the first step: what does not fit in memory fails at once.
    """
    tokens = _row("length_grouped(lengths)", lengths)
    _count("length_grouped(batch)", batch)
    if mega is not None:
        _count("length_grouped(mega)", mega)

    def order(seed: int, epoch: int, length: int) -> np.ndarray:
        known, shuffled = _of(tokens, length, "length_grouped(lengths)"), permutation(seed, epoch, length)
        stretch = (mega or max(1, min(length // (4 * batch), 50))) * batch
        cuts = [shuffled[i : i + stretch] for i in range(0, length, stretch)]
        cuts = [cut[np.argsort(-known[cut], kind="stable")] for cut in cuts]
        longest = max(range(len(cuts)), key=lambda k: known[cuts[k][0]])
        cuts[0][0], cuts[longest][0] = cuts[longest][0], cuts[0][0]
        return np.concatenate(cuts)

    return order


def curriculum(scores: Row, epochs: int, start: float = 0.2) -> Order:
    """Easy samples first: an epoch is a permutation of the easiest ones, and from epoch `epochs` on of all.

    `scores`: how hard each sample of the data is, the lowest the easiest. The first epoch has the part `start` of the data, and each
    one later more of it, in equal steps (the linear competence of Platanios et al. 2019, arXiv:1903.09848).
    """
    hard = _row("curriculum(scores)", scores, least=-np.inf)
    _count("curriculum(epochs)", epochs)
    if not 0 < start <= 1:
        raise _wrong("curriculum(start)", f"it is {start}, no part of the data: a number above 0 and at most 1")

    def order(seed: int, epoch: int, length: int) -> np.ndarray:
        part = start + (1 - start) * min(1.0, epoch / epochs)
        count = max(1, round(part * length))
        easiest = np.argsort(_of(hard, length, "curriculum(scores)"), kind="stable")[:count]
        return easiest[permutation(seed, epoch, count)]

    return order


def drop_last(batch: int, order: Order | None = None) -> Order:
    """Another order (None: a permutation) without the last, short batch of an epoch, as `DataLoader(drop_last=True)`.

    `batch`: samples of a step. Data shorter than that are a batch all the same.
    """
    _count("drop_last(batch)", batch)

    def cut(seed: int, epoch: int, length: int) -> np.ndarray:
        whole = epoch_order(order, seed, epoch, length)
        return whole[: len(whole) // batch * batch or len(whole)]

    return cut


def _generator(seed: int, epoch: int, word: str) -> Generator:
    return Generator(Philox(key=key(seed, word, epoch)))


def _parts(count: int, shares: np.ndarray) -> list[int]:
    """`count` shared out by largest remainder."""
    exact = shares / shares.sum() * count
    found = np.floor(exact).astype(int)
    for k in np.argsort(found - exact, kind="stable")[: count - found.sum()]:
        found[k] += 1
    return found.tolist()


def _row(name: str, values: object, least: float = 0.0) -> np.ndarray:
    """The numbers as an array, one for each sample. J027."""
    try:
        found = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise _wrong(name, f"it is a {type(values).__name__}, not a row of numbers") from None
    if found.ndim != 1 or not len(found) or not np.isfinite(found).all() or found.min() < least:
        raise _wrong(name, f"its shape is {list(found.shape)}; it is a row of finite numbers" + " ≥ 0" * (least == 0))
    return found


def _of(row: np.ndarray, length: int, name: str) -> np.ndarray:
    if len(row) != length:
        raise _wrong(name, f"there are {len(row)}, and the data has {length} samples")
    return row


def _whole(value: object) -> bool:
    return type(value) is int and value >= 1


def _count(name: str, value: object) -> None:
    if not _whole(value):
        raise _wrong(name, f"it is {value!r}, not a whole number ≥ 1")


def _wrong(name: str, why: str) -> PlaitError:
    return PlaitError(Problem("J027", f"plait.orders.{name} does not fit the data", why=why, where="Job(order=…)"))
