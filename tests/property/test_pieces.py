"""Any layout of tensors over any ranks is saved without a rank storing the full tensors, and is loaded into any other layout, bit for bit."""

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait import PlaitError
from plait.checkpoint import safetensors_file
from plait.checkpoint.checkpoint_reader import CheckpointReader
from plait.checkpoint.manifest import read_manifest
from plait.checkpoint.safetensors_file import (
    DTYPE_NAMES,
    LocalChunk,
    Rect,
    assign_writers,
    find_tiling_error,
    intersect_rects,
    subtract_rect,
)
from plait.checkpoint.saving import publish_checkpoint, write_part
from plait.tensors.rows import Part, slice_ranges

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
VALUES: dict[str, Any] = {
    "position": {"step": 1, "epoch": 0, "start": 0, "samples": 8, "state": None}, "plan": "", "seed": 0, "batch": 8,
    "versions": {}, "aliases": {}, "scaler": None, "optimizer": {"type": "Adam", "groups": [], "scalars": {}},
    "carried": {"rank": 0, "world": 1, "values": {}, "unsaved": {}, "of_all": False},
}  # fmt: skip
Layout = list[dict[str, list[Rect]]]
"""Per rank, its rectangles of each tensor."""


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    found = {}
    for i in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0 if i == 3 else 1, 7), max_size=3))
        raw = torch.randint(0, 256, (math.prod(shape), 8), dtype=torch.uint8)
        dtype = draw(st.sampled_from(DTYPES))
        flat = raw[:, :1] > 127 if dtype == torch.bool else raw[:, : dtype.itemsize].contiguous().view(dtype)
        found[f"model/{i}"] = flat.reshape(shape)
    return found


def cut(draw: st.DrawFn, rect: Rect, times: int) -> list[Rect]:
    """Splits a rectangle into smaller ones."""
    start, size = rect
    dims = [d for d, n in enumerate(size) if n > 1]
    if not times or not dims:
        return [rect]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, size[dim] - 1))
    a = start, (*size[:dim], at, *size[dim + 1 :])
    b = (*start[:dim], start[dim] + at, *start[dim + 1 :]), (*size[:dim], size[dim] - at, *size[dim + 1 :])
    return cut(draw, a, times - 1) + cut(draw, b, times - 1)


@st.composite
def layouts(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]], overlapping: bool) -> Layout:
    """Every rectangle is on one rank or several. With `overlapping`, some ranks have additional rectangles that cross the boundaries."""
    ranks = draw(st.integers(1, 4))
    layout: Layout = [{} for _ in range(ranks)]
    for name, shape in shapes.items():
        whole: Rect = ((0,) * len(shape), shape)
        for rect in cut(draw, whole, draw(st.integers(0, 2))):
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                layout[rank].setdefault(name, []).append(rect)
        if overlapping and draw(st.booleans()):
            more = draw(st.sampled_from(cut(draw, whole, 2)))
            layout[draw(st.integers(0, ranks - 1))].setdefault(name, []).append(more)
    return layout


def held(layout: Layout, whole: dict[str, torch.Tensor]) -> list[list[LocalChunk]]:
    return [
        [
            LocalChunk(name, DTYPE_NAMES[whole[name].dtype], whole[name].element_size(), tuple(whole[name].shape), *rect)
            for name, rects in mine.items()
            for rect in rects
        ]
        for mine in layout
    ]


def inside(tensor: torch.Tensor, rect: Rect) -> torch.Tensor:
    for dim, (first, length) in enumerate(zip(*rect)):
        tensor = tensor.narrow(dim, first, length)
    return tensor


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares bit for bit, NaN included."""
    return bytes(a.contiguous().view(-1).view(torch.uint8).numpy()) == bytes(
        b.contiguous().view(-1).view(torch.uint8).numpy()
    )


@given(data=st.data(), whole=tensors(), limit=st.sampled_from((1, 16, 64, 1 << 20)))
def test_any_layout_is_read_into_any_other(data: st.DataObject, whole: dict[str, torch.Tensor], limit: int) -> None:
    shapes = {name: tuple(t.shape) for name, t in whole.items()}
    saved = data.draw(layouts(shapes, overlapping=True))
    wanted = data.draw(layouts(shapes, overlapping=True))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_file, "MAX_CHUNK_BYTES", limit)
        path, building = Path(folder) / "step-000001", Path(folder) / "building"
        lists = held(saved, whole)
        plan = assign_writers(lists)
        empty = [h for mine in lists for h in mine if 0 in h.shape]
        for rank, mine in enumerate(plan):
            assert all(any(h.name == w.name and intersect_rects(h.rect, w.rect) == w.rect for h in lists[rank]) for w in mine)
            write_part(building, rank, {h: inside(whole[h.name], h.rect).contiguous() for h in mine}, VALUES)
        publish_checkpoint(building, path, len(plan), None, empty)
        manifest = read_manifest(path)
        assert set(manifest.tensors) == set(whole)
        for mine in wanted:
            reader = CheckpointReader(path, manifest.files, manifest.tensors)
            for name, rects in mine.items():
                for rect in rects:
                    part = Part(
                        torch.zeros(rect[1], dtype=whole[name].dtype),
                        shapes[name],
                        tuple(((s, n),) for s, n in zip(*rect)),
                    )
                    reader.check_part(name, part)
                    reader.read_part(name, part)
                    assert same(part.tensor, inside(whole[name], rect)), (name, rect)


@given(data=st.data(), shape=st.lists(st.integers(1, 6), max_size=3).map(tuple))
def test_what_is_written_covers_everything_once(data: st.DataObject, shape: tuple[int, ...]) -> None:
    layout = data.draw(layouts({"x": shape}, overlapping=True))
    lists = held(layout, {"x": torch.zeros(shape)})
    covered = torch.zeros(shape, dtype=torch.int32)
    for mine in assign_writers(lists):
        for piece in mine:
            inside(covered, piece.rect).add_(1)
    assert bool((covered == 1).all())
    rects = [piece.rect for mine in assign_writers(lists) for piece in mine]
    assert find_tiling_error(shape, rects) is None
    assert find_tiling_error(shape, rects[1:]) is not None and find_tiling_error(shape, [*rects, rects[0]]) is not None


@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
def test_a_difference_of_rectangles(data: st.DataObject, shape: tuple[int, ...]) -> None:
    whole: Rect = ((0,) * len(shape), shape)
    a, b = (data.draw(st.sampled_from(cut(data.draw, whole, 2))) for _ in range(2))
    left = torch.zeros(shape, dtype=torch.int32)
    for rect in subtract_rect(a, b):
        inside(left, rect).add_(1)
    expected = torch.zeros(shape, dtype=torch.int32)
    inside(expected, a).fill_(1)
    inside(expected, b).fill_(0)
    assert torch.equal(left, expected)


def test_copies_are_written_in_equal_shares() -> None:
    whole = {f"{i}": torch.zeros(64, 100 + i) for i in range(40)}
    everything = {name: [((0, 0), tuple(t.shape))] for name, t in whole.items()}
    shares = [sum(h.num_bytes for h in mine) for mine in assign_writers(held([everything] * 4, whole))]
    assert max(shares) < 1.02 * min(shares) and sum(shares) == sum(t.nbytes for t in whole.values())
    large = {"x": [((0, 0), (1000, 100_000))]}
    shares = [sum(h.num_bytes for h in mine) for mine in assign_writers(held([large] * 3, {"x": torch.empty(1000, 100_000)}))]
    assert max(shares) < 1.2 * min(shares), "a large tensor is cut between its holders"


def test_what_nobody_holds_is_said() -> None:
    whole = {"model/x": torch.zeros(4, 3)}
    with pytest.raises(PlaitError, match="cover 9 of 12"):
        assign_writers(held([{"model/x": [((0, 0), (2, 3))]}, {"model/x": [((3, 0), (1, 3))]}], whole))
    lists = held([{"model/x": [((0, 0), (4, 3))]}], whole) + held(
        [{"model/x": [((0,), (4,))]}], {"model/x": torch.zeros(4)}
    )
    with pytest.raises(PlaitError, match="disagree"):
        assign_writers(lists)


def test_a_part_of_several_ranges_is_made_of_rectangles() -> None:
    fused = torch.arange(24.0).view(12, 2)
    ranges = (((0, 2), (4, 2), (8, 2)), ((1, 1),))
    part = Part(torch.cat([fused[i : i + 2, 1:] for i in (0, 4, 8)]), (12, 2), ranges)
    found = torch.zeros(12, 2)
    for piece in part.iter_rects():
        piece.slice_tensor(found).copy_(piece.tensor)
    assert not part.is_full and torch.equal(found.nonzero(), torch.tensor([[i, 1] for i in (0, 1, 4, 5, 8, 9)]))
    assert torch.equal(found[found != 0], part.tensor.flatten()[part.tensor.flatten() != 0])
    assert slice_ranges(ranges[0], 1, 4) == ((1, 1), (4, 2), (8, 1))
