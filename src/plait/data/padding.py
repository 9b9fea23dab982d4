"""Dynamic padding that does not know the layout: every micro-batch is padded to the longest sample of the global batch.

A `collate` that pads to the longest sample it is given makes other shapes of a part of a batch than of the whole. Then
dropout draws other masks, and whatever looks at padded places computes something else: another training per layout. So
ranks tell each other the shapes of what they collated; whoever has the longest sample of the global batch says which it
is, and whoever has shorter ones collates them once more together with it and drops its rows again. No pad value is
needed, and `collate` may pad on either side, to multiples, or several tensors each to a length of its own.

A `collate` that does otherwise (that sorts, draws at random, packs or crops) is left alone, and named where shapes differ.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.data.batch import Batch, BatchShare, Micro, collate, is_map, rows_of, seeded_sample
from plait.data.batch_rows import Pair, SampleRows
from plait.data.iterables import exchange_numbers, naming_samples, read_apart
from plait.randomness.keyed import host_kept
from plait.tensors.torch_private import tree_map_only

CPU = torch.device("cpu")
"""Where shapes are compared: of hosts, and no device is waited for."""
Fetch = Callable[[int], Any] | None
LOOSE = "shapes of a micro-batch depend on which samples come together, and the data's `collate` does not pad to the longest"


class Padding:
    """Pads the micro-batches of one data set. All ranks of the group go along, batch by batch."""

    def __init__(self, data: object, group: ProcessGroup | None):
        self.data, self.group = data, group
        self.rows: SampleRows | None = None
        self.loose = False
        """Shapes differed, and were left as they are."""

    def batch(self, batch: Batch, fetch: Fetch) -> Batch:
        """The batch with all its micro-batches padded alike. `fetch` gives a sample of the global batch that another rank has;
        without it, shapes that differ are left as they are."""
        return replace(batch, micro=tuple(self.alike(batch.micro, fetch)))

    def alike(self, micros: Iterable[Micro], fetch: Fetch) -> list[Micro]:
        """The micro-batches, padded to the longest sample that any rank has."""
        whole = [replace(micro, samples=unpacked(micro.samples)) for micro in micros]
        lone = next((sample for micro in whole for sample in micro.samples), None)
        if self.rows is None and lone is not None:
            self.rows = rows_of(self.data, lone)
        forms = [self._form(micro) for micro in whole]
        least, most = self._least_and_most([form for micro, form in zip(whole, forms) if micro.count])
        if most is None or least == most:
            return whole
        company = self._company(whole, forms, most) if fetch is not None else None
        if company is None or fetch is None:
            self.loose = True
            return whole
        own = {i: sample for micro in whole for i, sample in zip(micro.ids, micro.samples)}
        beside = [own[i] if i in own else fetch(i) for i in company]
        return [micro if form == most else self._padded(micro, beside, most) for micro, form in zip(whole, forms)]

    def _form(self, micro: Micro) -> tuple[int, ...] | None:
        assert self.rows is not None
        return self.rows.form((micro.inputs, micro.targets), micro.count or 1)

    def _least_and_most(self, forms: list[tuple[int, ...] | None]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """The smallest and the largest sizes over all ranks; none when they are not of one kind."""
        bad = any(form is None for form in forms) or len({len(form or ()) for form in forms}) > 1
        known = [form for form in forms if form]
        mine = () if bad or not known else (*map(min, zip(*known)), *map(max, zip(*known)))
        rows = exchange_numbers((int(bad), *mine), self.group, CPU)
        sizes = [row[1:] for row in rows if len(row) > 1]
        if any(row[0] for row in rows) or len({len(row) for row in sizes}) != 1:
            self.loose = self.loose or any(row[0] for row in rows)
            return (), None
        half = len(sizes[0]) // 2
        least = tuple(min(row[i] for row in sizes) for i in range(half))
        return least, tuple(max(row[half + i] for row in sizes) for i in range(half))

    def _company(self, micros: list[Micro], forms: list[Any], most: tuple[int, ...]) -> list[int] | None:
        """Ids of samples that together have the largest sizes. A size whose sample is not found by its rank: None."""
        mine: dict[int, int] = {}
        for place, size in enumerate(most):
            for micro, form in zip(micros, forms):
                if place not in mine and micro.count and form[place] == size:
                    mine[place] = self._longest(micro, place, size)
        own = [number for place, i in mine.items() for number in (place, i)]
        longest: dict[int, int] = {}
        for numbers in exchange_numbers(own, self.group, CPU):
            for place, i in zip(numbers[::2], numbers[1::2]):
                longest.setdefault(place, i)
        return sorted(set(longest.values())) if len(longest) == len(most) else None

    def _longest(self, micro: Micro, place: int, size: int) -> int:
        """The id of the sample that has this size: by halves."""
        assert self.rows is not None
        samples, ids = list(micro.samples), list(micro.ids)
        while len(ids) > 1:
            half = len(ids) // 2
            form = self.rows.form(self._collated(samples[:half]), half)
            keep = slice(0, half) if form is not None and form[place] == size else slice(half, None)
            samples, ids = samples[keep], ids[keep]
        return ids[0]

    @host_kept()
    def _collated(self, samples: list[Any]) -> Pair:
        return collate(self.data, samples)

    def _padded(self, micro: Micro, company: list[Any], most: tuple[int, ...]) -> Micro:
        """The micro-batch collated beside the longest samples, without their rows, when it has the largest sizes then."""
        assert self.rows is not None
        samples, own = list(micro.samples), (micro.inputs, micro.targets)
        total = len(samples) + len(company)
        pair = self.rows.first(self._collated([*samples, *company]), len(samples), total)
        form = self.rows.form(pair, len(samples))
        if (micro.count and form != most) or not self.rows.holds(pair, own):
            self.loose = True
            return micro
        return replace(micro, inputs=pair[0], targets=pair[1])


def fetching(data: object, seed: int, batch: Batch, share: BatchShare) -> Fetch:
    """Gives samples of a step's global batch by their ids, wherever they are read; None where a rank reads its share only."""
    if is_map(data):
        epoch = batch.position.epoch

        def fetch(i: int) -> object:
            with naming_samples([i], f"of epoch {epoch}"):
                return seeded_sample(data, seed, epoch, i)

        return fetch
    if read_apart(data, share):
        return None
    return lambda i: unpacked(batch.around[i - batch.position.start])


@dataclass(frozen=True)
class Packed:
    """A tensor on its way from a loader process: its bytes travel with the message, and take no file each."""

    data: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


def packed(samples: object) -> Any:
    def one(t: Tensor) -> Any:
        if t.layout is not torch.strided or t.device.type != "cpu":
            return t
        raw = t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return Packed(raw, t.dtype, tuple(t.shape))

    return tree_map_only(Tensor, one, samples)


def unpacked(samples: object) -> Any:
    def one(p: Packed) -> Tensor:
        if not p.data:
            return torch.empty(p.shape, dtype=p.dtype)
        return torch.frombuffer(bytearray(p.data), dtype=torch.uint8).view(p.dtype).reshape(p.shape)

    return tree_map_only(Packed, one, samples)
