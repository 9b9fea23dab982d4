"""Attention that counts and rotates its own positions, on sequence shards: each way to write it equals one device."""

from collections.abc import Callable

import pytest
import torch
from jobs_context import Attention, Routed, tokens
from rarely import rarely, sampled
from torch import Tensor, nn
from torch.nn import functional as F

from plait.config.plan import Plan
from plait.proof.verify import verify


def angles(x: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines [length, width / 2] for the rotation of pairs in x [batch, heads, length, width]."""
    places = torch.arange(x.shape[2], dtype=x.dtype)[:, None]
    turned = places / 7 ** (torch.arange(0, x.shape[3], 2, dtype=x.dtype) / x.shape[3])
    return turned.cos(), turned.sin()


def halves(x: Tensor) -> Tensor:
    (c, s), (a, b) = angles(x), x.chunk(2, -1)
    return torch.cat([a * c - b * s, a * s + b * c], -1)


def interleaved(x: Tensor) -> Tensor:
    (c, s), a, b = angles(x), x[..., ::2], x[..., 1::2]
    return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)


def complex_numbers(x: Tensor) -> Tensor:
    turn = torch.complex(*angles(x))
    return torch.view_as_real(torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2))) * turn).flatten(-2)


def rolled(x: Tensor) -> Tensor:
    c, s = (t.repeat_interleave(2, -1) for t in angles(x))
    sign = torch.ones(x.shape[3], dtype=x.dtype).cumsum(0).cos()
    return F.normalize(x, dim=-1) * c + x.roll(1, -1).flip(-1) * sign * s / (1 + x.norm(dim=-1, keepdim=True))


class Turning(Attention):
    """Rotates queries and keys by positions that it counts."""

    def __init__(self, turn: Callable[[Tensor], Tensor], inner: nn.Module | None = None):
        super().__init__(inner)
        self.turn = turn

    def split(self, h: Tensor) -> list[Tensor]:
        q, k, v = super().split(h)
        return [self.turn(q), self.turn(k), v]


WAYS = {way.__name__: tokens(lambda way=way: Turning(way)) for way in (halves, interleaved, complex_numbers, rolled)}
WAYS["beside a mixture"] = tokens(lambda: Turning(interleaved, Routed()))


@pytest.mark.parametrize(
    "name, text",
    sampled(
        3,
        (
            ("halves", "cp=2 cp_method=ulysses"),
            *rarely(
                ("interleaved", "cp=2"), ("beside a mixture", "cp=2"), ("rolled", "cp=2 cp_method=ulysses microbatches=2")
            ),
            ("interleaved", "tp=2 cp=2"),
            *rarely(("complex_numbers", "cp=2 activation_checkpointing=full")),
            ("beside a mixture", "dp=2 ep=2 cp=2"),
        ),
    ),
)
def test_equal(name: str, text: str) -> None:
    verdict = verify(WAYS[name](), Plan.parse(text), steps=3)
    assert verdict.equal, (verdict.code, verdict.parameter, verdict.cause, verdict.to_dict())
