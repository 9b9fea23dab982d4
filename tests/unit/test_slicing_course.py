"""A row of a few tokens may take another branch through the model than a full row. Then longer rows are analyzed."""

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from plait.parallel.tensor.find.finder import find_slices

WIDTH, HEADS, WINDOW = 16, 4, 8


class Attention(nn.Module):
    """Many query heads, one of keys and values. A row that is longer than the window has a mask, and repeats them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH // HEADS),
            nn.Linear(WIDTH, WIDTH // HEADS),
        )
        self.out, self.size, self.groups = nn.Linear(WIDTH, WIDTH), WIDTH // HEADS, HEADS

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for m in (self.q, self.k, self.v))
        if mask is None:
            found = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
            found = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(11, WIDTH), Attention()

    def forward(self, x: Tensor) -> Tensor:
        n = torch.arange(x.shape[1])
        near = (n[:, None] >= n) & (n[:, None] - n < WINDOW)
        return self.block(self.words(x), near if x.shape[1] > WINDOW else None)


def groups_of(given: tuple[tuple[str, int], ...]) -> list[str]:
    """The attributes of the block that two ranks halve."""
    model = Model()
    found = find_slices(model, lambda k: torch.randint(11, (k, 12)), lambda m, x: m(x), 2, given=given)
    return [i.path for g in found.groups for i in g.scaled_attributes if i.module == "block"]


def test_slices_are_looked_for_on_rows_that_take_the_course_of_whole_ones() -> None:
    assert groups_of(()) == []  # five tokens need no mask, and no repetition
    assert groups_of((("words", 1), ("block", 2))) == ["groups"]
    assert groups_of((("words", 1), ("block", 7))) == []  # no number of tokens reaches that branch: the shortest rows, as without the hint
