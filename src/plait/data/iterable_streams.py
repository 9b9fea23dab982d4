"""Iterables over ranks: every rank reads the same samples in the same order, or what it keeps is not its share of them.

An iterable that cuts itself by rank, or shuffles by a generator of its own, gives every rank other samples: some would
be trained on twice and some never, and nothing would look wrong. So in every step ranks compare a digest of what they
read. Noise that only some part of a sample has (augmentation by a generator of its own) is no harm: the order is told
by the other parts.
"""

import zlib
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.config.errors import PlaitError, Problem
from plait.tensors.torch_private import tree_leaves

PARTS = 8
"""Of a sample's tensors and numbers, so many are compared."""


def digest(samples: list[Any]) -> tuple[int, ...]:
    """For each part of the samples a number that tells their values and order; 0 when it is the same in all of them."""
    if not samples:
        return (0,) * PARTS
    rows = [[_number(leaf) for leaf in tree_leaves(sample)[:PARTS]] for sample in samples]
    parts = list(zip(*rows)) if len({len(row) for row in rows}) == 1 else [tuple(map(hash, map(tuple, rows)))]
    told = [0 if len(set(part)) == 1 else zlib.crc32(repr(part).encode()) + 1 for part in parts]
    return tuple([*told, *[0] * PARTS][:PARTS])


def number_of(sample: object) -> int:
    """A number that tells a sample's values."""
    return zlib.crc32(repr([_number(leaf) for leaf in tree_leaves(sample)]).encode())


def _number(leaf: object) -> int:
    if isinstance(leaf, Tensor):
        leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy() if leaf.numel() else b""
    if isinstance(leaf, np.ndarray):
        leaf = np.ascontiguousarray(leaf).tobytes() if leaf.dtype != object else repr(leaf)
    return zlib.crc32(leaf if isinstance(leaf, bytes) else repr(leaf).encode())


def agree(read: int, seen: tuple[int, ...], group: ProcessGroup | None, where: str) -> bool:
    """Whether every rank of the group read `read` samples that are the same; all ranks call it.

    False when they differ in noise only. J022 when they are other samples.
    """
    mine = torch.tensor([read, *seen], dtype=torch.int64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    others = [rank for rank, row in enumerate(rows) if not torch.equal(row, rows[0])]
    if not others:
        return True
    table = torch.stack(rows)
    told = [bool(column.any()) and bool((column == column[0]).all()) for column in table[:, 1:].T]
    if any(told) and bool((table[:, 0] == read).all()):
        return False
    raise PlaitError(_unlike(others[0], table[:, 0].tolist(), where))


def _unlike(rank: int, counts: list[int], where: str) -> Problem:
    what = f"ranks 0 and {rank} read different samples from an iterable"
    if counts[0] != counts[rank]:
        what = f"an iterable ended after {counts[0]} samples on rank 0 and after {counts[rank]} on rank {rank}"
    why = "every rank reads all of an iterable and keeps its share; this one is cut by rank already, or shuffled by a generator of its own"
    fix = (
        "read all of it on every rank: without RANK, split_dataset_by_node or split_by_node",
        "shuffle with Python's, numpy's or torch's own generators, or with a seed",
        "give it  shard(num_shards, index) -> that share's samples,  and each rank reads its share only",
    )
    return Problem("J022", what, why=why, where=where, fix=fix)
