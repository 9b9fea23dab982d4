"""Dynamic padding independent of the layout: every micro-batch is padded to the longest sample of the global batch.

A `collate` that pads to its longest sample gives a micro-batch other shapes than the full batch. Then dropout draws other masks, and
computations on padded positions differ, so the result would depend on the layout. Therefore ranks exchange the shapes of their collated
micro-batches. The rank with the longest sample of the global batch identifies it. Ranks with shorter ones collate them again together with
that sample and drop its rows. No pad value is needed, and `collate` may pad on either side, to multiples, or several tensors to
different lengths.

A `collate` with other behavior (sorting, random draws, packing, cropping) is left unchanged, and reported if shapes differ.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.data.batch import Batch, BatchShare, MicroBatch, collate, find_sample_rows, is_map, seeded_sample
from plait.data.batch_rows import Pair, SampleRows
from plait.data.iterables import exchange_numbers, is_read_sharded, name_failing_samples
from plait.randomness.keyed import preserve_host_state
from plait.tensors.torch_private import tree_map_only

CPU = torch.device("cpu")
"""Device for comparing shapes on hosts, so that no accelerator is waited for."""
Fetch = Callable[[int], Any] | None
LOOSE_WARNING = "shapes of a micro-batch depend on its combination of samples, and the data's `collate` does not pad to the longest"


class BatchPadder:
    """Pads the micro-batches of one data set. All ranks of the group call it for every batch."""

    def __init__(self, data: object, group: ProcessGroup | None):
        self.data, self.group = data, group
        self.rows: SampleRows | None = None
        self.has_loose_shapes = False
        """Shapes differed and were left unchanged."""

    def pad_batch(self, batch: Batch, fetch: Fetch) -> Batch:
        """Return the batch with all micro-batches padded alike.

        `fetch` returns a sample of the global batch from another rank. Without it, shapes that differ are left unchanged.

        """
        return replace(batch, micro_batches=tuple(self.pad_micro_batches(batch.micro_batches, fetch)))

    def pad_micro_batches(self, micros: Iterable[MicroBatch], fetch: Fetch) -> list[MicroBatch]:
        """Return the micro-batches, padded to the longest sample of any rank. Collective."""
        whole = [replace(micro, samples=unpack_samples(micro.samples)) for micro in micros]
        lone = next((sample for micro in whole for sample in micro.samples), None)
        if self.rows is None and lone is not None:
            self.rows = find_sample_rows(self.data, lone)
        forms = [self._measure_sizes(micro) for micro in whole]
        least, most = self._reduce_size_range([form for micro, form in zip(whole, forms) if micro.count])
        if most is None or least == most:
            return whole
        company = self._choose_longest(whole, forms, most) if fetch is not None else None
        if company is None or fetch is None:
            self.has_loose_shapes = True
            return whole
        own = {i: sample for micro in whole for i, sample in zip(micro.ids, micro.samples)}
        beside = [own[i] if i in own else fetch(i) for i in company]
        return [micro if form == most else self._pad_micro_batch(micro, beside, most) for micro, form in zip(whole, forms)]

    def _measure_sizes(self, micro: MicroBatch) -> tuple[int, ...] | None:
        assert self.rows is not None
        return self.rows.measure_sizes((micro.inputs, micro.targets), micro.count or 1)

    def _reduce_size_range(self, forms: list[tuple[int, ...] | None]) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the smallest and the largest sizes over all ranks; (), None if their kinds differ."""
        bad = any(form is None for form in forms) or len({len(form or ()) for form in forms}) > 1
        known = [form for form in forms if form]
        mine = () if bad or not known else (*map(min, zip(*known)), *map(max, zip(*known)))
        rows = exchange_numbers((int(bad), *mine), self.group, CPU)
        sizes = [row[1:] for row in rows if len(row) > 1]
        if any(row[0] for row in rows) or len({len(row) for row in sizes}) != 1:
            self.has_loose_shapes = self.has_loose_shapes or any(row[0] for row in rows)
            return (), None
        half = len(sizes[0]) // 2
        least = tuple(min(row[i] for row in sizes) for i in range(half))
        return least, tuple(max(row[half + i] for row in sizes) for i in range(half))

    def _choose_longest(self, micros: list[MicroBatch], forms: list[Any], most: tuple[int, ...]) -> list[int] | None:
        """Return ids of samples that together have the largest sizes; None if a rank cannot find the sample of a size."""
        mine: dict[int, int] = {}
        for place, size in enumerate(most):
            for micro, form in zip(micros, forms):
                if place not in mine and micro.count and form[place] == size:
                    mine[place] = self._find_longest(micro, place, size)
        own = [number for place, i in mine.items() for number in (place, i)]
        longest: dict[int, int] = {}
        for numbers in exchange_numbers(own, self.group, CPU):
            for place, i in zip(numbers[::2], numbers[1::2]):
                longest.setdefault(place, i)
        return sorted(set(longest.values())) if len(longest) == len(most) else None

    def _find_longest(self, micro: MicroBatch, place: int, size: int) -> int:
        """Return the id of the sample with this size, by bisection."""
        assert self.rows is not None
        samples, ids = list(micro.samples), list(micro.ids)
        while len(ids) > 1:
            half = len(ids) // 2
            form = self.rows.measure_sizes(self._collate(samples[:half]), half)
            keep = slice(0, half) if form is not None and form[place] == size else slice(half, None)
            samples, ids = samples[keep], ids[keep]
        return ids[0]

    @preserve_host_state()
    def _collate(self, samples: list[Any]) -> Pair:
        return collate(self.data, samples)

    def _pad_micro_batch(self, micro: MicroBatch, company: list[Any], most: tuple[int, ...]) -> MicroBatch:
        """Collate the micro-batch with the longest samples and drop their rows, if it has the largest sizes then."""
        assert self.rows is not None
        samples, own = list(micro.samples), (micro.inputs, micro.targets)
        total = len(samples) + len(company)
        pair = self.rows.take_first(self._collate([*samples, *company]), len(samples), total)
        form = self.rows.measure_sizes(pair, len(samples))
        if (micro.count and form != most) or not self.rows.contains(pair, own):
            self.has_loose_shapes = True
            return micro
        return replace(micro, inputs=pair[0], targets=pair[1])


def make_fetch(data: object, seed: int, batch: Batch, share: BatchShare) -> Fetch:
    """Return a function from an id to a sample of the step's global batch; None if each rank reads its shard only."""
    if is_map(data):
        epoch = batch.position.epoch

        def fetch(i: int) -> object:
            with name_failing_samples([i], f"of epoch {epoch}"):
                return seeded_sample(data, seed, epoch, i)

        return fetch
    if is_read_sharded(data, share):
        return None
    return lambda i: unpack_samples(batch.all_samples[i - batch.position.start])


@dataclass(frozen=True)
class PackedTensor:
    """A tensor sent from a loader process as bytes in the message, which needs no file descriptor."""

    data: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


def pack_samples(samples: object) -> Any:
    def pack(t: Tensor) -> Any:
        if t.layout is not torch.strided or t.device.type != "cpu":
            return t
        raw = t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return PackedTensor(raw, t.dtype, tuple(t.shape))

    return tree_map_only(Tensor, pack, samples)


def unpack_samples(samples: object) -> Any:
    def unpack(p: PackedTensor) -> Tensor:
        if not p.data:
            return torch.empty(p.shape, dtype=p.dtype)
        return torch.frombuffer(bytearray(p.data), dtype=torch.uint8).view(p.dtype).reshape(p.shape)

    return tree_map_only(PackedTensor, unpack, samples)
