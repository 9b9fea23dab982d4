"""Replacement of the values that code reads from tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from plait.tensors.opaque_code import AlteredReads, Lines, format_read_lines, scale_unevenly, try_altered_reads


def outcomes(run: Callable[[], Any]) -> list[tuple[Lines, Any]]:
    """The results of `run` with the values that it reads, and with others."""
    with AlteredReads() as numbers:
        result = run()
    return [(frozenset(), result), *try_altered_reads(run, numbers.read)]


def branches(x: torch.Tensor) -> str:
    if x.max() > 3:
        return "large and far" if x[0].item() > 2.0 else "large"
    return "small"


def test_every_branch_is_taken() -> None:
    x = torch.zeros(2)
    found = [(len(lines), result) for lines, result in outcomes(lambda: branches(x))]
    assert found == [(0, "small"), (1, "large"), (2, "large and far")]


def test_what_raises_is_left_out() -> None:
    def run() -> int:
        assert torch.isfinite(torch.ones(2)).all()
        return 1

    assert [result for _, result in outcomes(run)] == [1]
    with pytest.raises(ZeroDivisionError):
        outcomes(lambda: 1 // 0)


def test_a_loop_that_would_not_end_is_given_up() -> None:
    def run() -> int:
        x, n = torch.zeros(()), 0
        while x < 3:
            x, n = x + 1, n + 1
        return n

    assert [result for _, result in outcomes(run)] == [3, 0]


def test_other_numbers_may_keep_a_loop_from_ending() -> None:
    def run() -> int:
        x, n = torch.ones(()), 0
        while x > 2:
            n += 1
        return n

    assert [result for _, result in outcomes(run)] == [0]


@pytest.mark.parametrize("read, other", [
    (lambda x: x.tolist(), [10.0, 17.0]), (lambda x: float(x[0]), 10.0), (lambda x: int(x[1]), 3), (lambda x: 1.0 in x, False),
    (lambda x: torch.equal(x, x), False), (lambda x: (x.numpy() + 0).tolist(), [2.0, 3.0]),
    (lambda x: (x > 1).numpy().tolist(), [True, False]), (lambda x: [5, 6, 7, 8][x.long()[1]], 8),
])  # fmt: skip
def test_reads_of_any_kind(read, other) -> None:
    x = torch.tensor([1.0, 2.0])
    ((_, plain), (lines, found), *_) = outcomes(lambda: read(x))
    assert plain == read(x) and found == other and len(lines) == 1
    assert "test_read_numbers.py" in format_read_lines(lines) and not format_read_lines(frozenset())


def test_the_numbers_of_tensors_stay() -> None:
    x = torch.arange(3.0)
    (_, (lines, _)) = outcomes(lambda: x.tolist())
    with AlteredReads(lines):
        assert torch.equal(x + 0, x)
    assert x.tolist() == [0.0, 1.0, 2.0]


def test_uneven_rows() -> None:
    x = torch.ones(2, 3, 2)
    assert scale_unevenly(x, 1, (16.0, 0.5))[0, :, 0].tolist() == [0.5, 0.5, 16.0] and scale_unevenly(x, -1, (0.0, 1.0))[0, 0].tolist() == [1.0, 0.0]
