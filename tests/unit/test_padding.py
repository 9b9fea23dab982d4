"""Padding to the longest sample of the global batch: which collate functions it supports, and which batches it leaves unchanged."""

from typing import Any

import pytest
import torch
from jobs_padded import Pairs, Sentences, Streamed, tagger
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from plait.data.batch import BatchShare, MicroBatch, Position, collate, collate_with_others, find_sample_rows
from plait.data.loading import iter_batches
from plait.data.padding import BatchPadder, make_fetch, pack_samples, unpack_samples
from plait.engine.engine import Engine


class Lengths:
    """Sample i has i + 1 tokens. `how` selects the collate function."""

    def __init__(self, how: str, n: int = 12):
        self.how, self.n = how, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Tensor:
        return torch.arange(1, i + 2)

    def collate(self, samples: list[Tensor]) -> tuple[Any, Any]:
        if self.how == "sorts":
            samples = sorted(samples, key=len, reverse=True)
        sizes = [len(s) for s in samples]
        padded = pad_sequence(samples, batch_first=self.how != "time first")
        if self.how == "flat":
            padded = padded.flatten()
        if self.how == "packs":
            padded = torch.cat(samples)
        if self.how == "draws":
            padded = padded * torch.randint(1, 10**6, padded.shape)
        if self.how == "crops":
            padded = padded[:, : min(sizes)]
        if self.how == "square":
            padded = padded[:, :, None] * padded[:, None, :]
        return {"x": padded, "longest": max(sizes), "names": [str(n) for n in sizes]}, torch.tensor(sizes)


def micros(how: str, parts: int = 3) -> tuple[BatchPadder, list[Any], Any]:
    data = Lengths(how)
    padding = BatchPadder(data, None)
    share = BatchShare(0, 1, parts)
    source = iter_batches(data, len(data), 0, share, Position())
    batch = next(source)
    pinned = padding.pad_batch(batch, make_fetch(data, 0, batch, BatchShare()))
    whole = collate(data, [data[i] for micro in batch.micro_batches for i in micro.ids])
    return padding, list(pinned.micro_batches), whole


@pytest.mark.parametrize("how", ("pads", "time first", "square"))
def test_parts_have_the_rows_of_the_whole(how: str) -> None:
    padding, parts, (inputs, targets) = micros(how)
    dim = 1 if how == "time first" else 0
    assert torch.equal(torch.cat([m.inputs["x"] for m in parts], dim), inputs["x"]) and not padding.has_loose_shapes
    assert torch.equal(torch.cat([m.targets for m in parts]), targets)
    assert all(m.inputs["longest"] == 12 for m in parts)
    assert [name for m in parts for name in m.inputs["names"]] == inputs["names"]


@pytest.mark.parametrize("how", ("sorts", "packs", "draws", "crops", "flat"))
def test_what_does_not_pad_is_left_alone(how: str) -> None:
    """A flat batch of padded rows has no dim of the padded size. In the other cases a row depends on the other samples of its batch."""
    padding, parts, _ = micros(how)
    assert padding.has_loose_shapes
    for micro in parts:
        torch.manual_seed(0)
        assert sorted(micro.inputs["names"]) == sorted(str(len(s)) for s in micro.samples)


def test_samples_of_one_shape_are_not_touched() -> None:
    class Alike(Lengths):
        def __getitem__(self, i: int) -> Tensor:
            return torch.full((4,), i)

    data = Alike("pads")
    batch = next(iter_batches(data, 12, 0, BatchShare(0, 1, 3), Position()))
    padding = BatchPadder(data, None)
    found = padding.pad_batch(batch, make_fetch(data, 0, batch, BatchShare()))
    assert all(a.inputs["x"] is b.inputs["x"] for a, b in zip(found.micro_batches, batch.micro_batches)) and not padding.has_loose_shapes


def test_rows_tell_where_samples_are() -> None:
    data = Pairs()
    rows, pair = find_sample_rows(data, data[0]), collate(data, [data[i] for i in range(5)])
    assert rows.measure_sizes(pair, 5) == (pair[0]["ids"].shape[1], pair[0]["mask"].shape[1], pair[1].shape[1]) or rows.measure_sizes(
        pair, 5
    ) == (1, pair[0]["ids"].shape[1], 1, pair[0]["mask"].shape[1], 1, pair[1].shape[1])
    assert rows.take_first(pair, 2, 5)[1].shape[0] == 2


def test_beside_has_the_lengths_of_the_company() -> None:
    data = Sentences()
    inputs, _ = collate_with_others(data, [data[0]], [data[i] for i in range(20)])
    assert inputs["ids"].shape == (1, max(len(data.rows[i]) for i in range(20)))


class Clouds:
    """Sample i has `points[i]` points, and pairs of points for all but the first. Samples are concatenated to one row."""

    def __init__(self, *points: int, square: bool = False):
        self.points, self.square = points, square

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, i: int) -> Any:
        return torch.full((self.points[i], 2), i), torch.arange(self.points[i])

    def collate(self, samples: list[Any]) -> tuple[Any, Any]:
        clouds, labels = zip(*samples)
        pairs, before = [], 0
        for cloud in clouds:
            pairs.append(before + torch.combinations(torch.arange(len(cloud))).t())
            before += len(cloud)
        apart = {"distances": torch.block_diag(*[x @ x.t() + 1 for x in clouds])} if self.square else {}
        return {"points": torch.cat(clouds), **apart, "pairs": torch.cat(pairs, 1)}, torch.cat(labels)


@pytest.mark.parametrize(
    "points, square", (((2, 5, 9), False), ((1, 5, 9), False), ((2, 5, 9), True), ((1, 1, 4), True))
)
def test_samples_in_one_row_are_no_rows_of_a_larger_batch(points: tuple[int, ...], square: bool) -> None:
    """Their part of a larger batch's rows starts with their own rows, and has rows of other samples, or too few rows."""
    data = Clouds(*points, square=square)
    for some in ([0], [0, 1]):
        inputs, targets = collate_with_others(data, [data[i] for i in some], [data[2]])
        alone = data.collate([data[i] for i in some])
        assert all(torch.equal(inputs[key], alone[0][key]) for key in inputs) and torch.equal(targets, alone[1])


def test_a_part_takes_no_rows_of_the_longest_sample() -> None:
    """A part has 4 points per sample, and 5 if it is collated with the longest sample, as many as another part has."""

    class Points(Clouds):
        def __getitem__(self, i: int) -> Any:
            return torch.full((self.points[i],), i), torch.arange(self.points[i])

        def collate(self, samples: list[Any]) -> tuple[Any, Any]:
            return tuple(torch.cat(each) for each in zip(*samples))

    data = Points(4, 4, 3, 7)
    parts = [MicroBatch(i, 2, *data.collate([data[i], data[i + 1]]), (i, i + 1), (data[i], data[i + 1])) for i in (0, 2)]
    padding = BatchPadder(data, None)
    found = padding.pad_micro_batches(parts, data.__getitem__)
    assert [len(micro.targets) for micro in found] == [8, 10] and padding.has_loose_shapes


@pytest.mark.parametrize("data", (Sentences, Streamed))
def test_loader_processes_change_nothing(data: type) -> None:
    def shapes(workers: int) -> list[Any]:
        with Engine(tagger(data), "microbatches=3", workers=workers) as engine:
            found = []
            for batch in engine.batches():
                found.append([(m.inputs["ids"].tolist(), m.targets.tolist()) for m in batch.micro_batches])
                engine.position = batch.next_position
            return found

    alone = shapes(0)
    assert alone == shapes(1) and all(len({len(m[0][0]) for m in step if m[0]}) == 1 for step in alone)


def test_samples_travel_as_bytes() -> None:
    sample = {"x": torch.randn(3, 2).bfloat16().t(), "y": torch.tensor(3), "z": torch.empty(0), "w": "text"}
    back = unpack_samples(pack_samples(sample))
    assert (
        all(torch.equal(back[k], sample[k]) and back[k].dtype == sample[k].dtype for k in "xyz") and back["w"] == "text"
    )
