"""What compressed sums send, in bytes, from shapes alone."""

import math
from collections.abc import Iterable

MATRIX = 2
"""Dims from which on a tensor is a matrix for powersgd: its first, and all others together."""


def sent(kind: str, shapes: Iterable[tuple[int, ...]], ranks: int, itemsize: int = 4, rank: int = 2) -> float:
    """Bytes that a rank sends in one sum of tensors of these shapes, in a ring.

    What is gathered passes through every rank: (N − 1) times a rank's own bytes, which grow with N. What is all-reduced
    takes 2 (N − 1) / N times the bytes, at most twice.

    >>> [sent(kind, [(1000, 1000)], 2) for kind in ("none", "bf16", "int8", "powersgd")]
    [4000000.0, 2000000.0, 1000008.0, 16004.0]
    >>> [sent(kind, [(1000, 1000)], 8) / 1e6 for kind in ("none", "bf16", "int8")]
    [7.0, 14.0, 7.000056]
    """
    shapes = list(shapes)
    numbers = [math.prod(shape) for shape in shapes]
    around, through = 2 * (ranks - 1) / ranks, float(ranks - 1)
    if kind == "bf16":
        return through * 2 * sum(numbers)
    if kind == "int8":
        return through * (sum(numbers) + 8 * len(shapes))
    if kind == "powersgd":
        return around * itemsize * sum(thin(shape, rank) for shape in shapes)
    return around * itemsize * sum(numbers)


def thin(shape: tuple[int, ...], rank: int) -> int:
    """Numbers that powersgd sends of a tensor: two thin matrices and a length, or all of it where these are not smaller."""
    rows, columns = matrix_shape(shape)
    return rank * (rows + columns) + 1 if compressible(shape, rank) else rows * columns


def compressible(shape: tuple[int, ...], rank: int) -> bool:
    """Whether the two thin matrices of a tensor are smaller than it."""
    rows, columns = matrix_shape(shape)
    return len(shape) >= MATRIX and rank * (rows + columns) < rows * columns


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix: its first dim, and all others."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)
