"""Packing: rows of exactly so many tokens, each made of several documents, so that nothing is padded but the rest of a row.

Documents are laid into rows by best fit, the longest first (best-fit-decreasing): a pure function of their lengths, so every rank and
every run has the same rows. A document longer than a row is cut into pieces, each of which counts as a document; no token is left
out. `position_ids` begin anew with each document, and that is all a model needs to keep documents apart:

    Hugging Face's decoders   make the mask of `position_ids` themselves where no `attention_mask` is given (transformers 5, with
                              sdpa, eager and flex_attention; flash attention cuts the row by them)
    a model of your own       scaled_dot_product_attention(q, k, v, attn_mask=plait.document_mask(position_ids))

The loss and the gradients of a row are then those of its documents one by one, as long as the loss is a mean over tokens that count
(`Job.weight`). What the model counts by row, such as a learned position beyond the longest document, has no meaning here.
"""

import math
import sys
import time
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from plait.config.errors import PlaitError, Problem
from plait.data.batch import LABELS, MapStyle, in_tensors, pair_of

MOST = 100_000_000
"""Documents that are read to count their tokens."""
PATIENCE = 10.0
"""Seconds after which it is said that they are."""
IGNORED = -100
"""The target of what is not to be predicted, as in `torch.nn.functional.cross_entropy`."""
Piece = tuple[int, int, int]
"""Number of a document, its first token, and how many."""


def packed(
    data: MapStyle, tokens: int, *, lengths: Sequence[int] | None = None, shifted: bool = True, pad: int = 0
) -> "PackedRows":
    """The documents of a tokenised data set, packed into rows of exactly `tokens` tokens.

    `data`: read by index; a document is a dict with input_ids [length] and labels [length] (without: input_ids), as Hugging Face
    has it, where the label of a place is its own token; or a pair (ids [length], targets [length]), where a target is what is
    predicted at its place already. `lengths`: the tokens of each document (None: all are read once to count them).

    A row is ({"input_ids": [tokens], "position_ids": [tokens]}, targets [tokens]), all int64. `shifted`: the target of a place is the
    token after it in its document, as losses of plait's have it, and the last place of a document has none; else targets are labels
    of their own places, for a model or a loss that shifts them itself, and the first place of a document has none. No target is -100,
    also at the rest of a row, which is filled with `pad`. The weight of a loss is then
    ``Job(weight=lambda targets: (targets != -100).sum())``. J029 for what is no document.
    """
    return PackedRows(data, tokens, lengths, shifted=shifted, pad=pad)


def document_mask(position_ids: Tensor) -> Tensor:
    """Which keys a query of packed rows may see: those of its own document up to itself.

    `position_ids` [batch, tokens], which begin anew with each document. Returns bool [batch, 1, tokens, tokens], True where it may
    see: the `attn_mask` of `torch.nn.functional.scaled_dot_product_attention`, in place of `is_causal`.
    """
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    document, place = begins.cumsum(-1), torch.arange(position_ids.shape[-1], device=position_ids.device)
    return ((document[:, :, None] == document[:, None, :]) & (place[:, None] >= place))[:, None]


def best_fit(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Which lengths go into each row, by number: the longest first, each into the fullest row that has room for it.

    >>> best_fit([3, 6, 2, 4, 5], 8)
    [[1, 2], [4, 0], [3]]
    """
    rows, room = list[list[int]](), dict[int, list[int]]()
    known = list[int]()  # the rooms that some row has, in order
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(known, lengths[i])
        if at == len(known):
            rows.append([])
            row, left = len(rows) - 1, tokens
        else:
            left = known[at]
            row = room[left].pop()
            if not room[left]:
                known.pop(at)
        rows[row].append(i)
        left -= lengths[i]
        if left and not room.setdefault(left, []):
            insort(known, left)
        room.setdefault(left, []).append(row)
    return rows


class PackedRows:
    """Rows of packed documents, as a data set that is read by index."""

    def __init__(self, data: MapStyle, tokens: int, lengths: Sequence[int] | None, *, shifted: bool, pad: int):
        if type(tokens) is not int or tokens < 1:
            raise _wrong(f"packed(tokens={tokens!r}) is not a whole number ≥ 1")
        self.data, self.tokens, self.shifted, self.pad = data, tokens, shifted, pad
        found = self._counted(len(data)) if lengths is None else [int(n) for n in lengths]
        if len(found) != len(data) or not found or min(found) < 0:
            raise _wrong(f"packed(lengths) has {len(found)} lengths, and the data {len(data)} documents")
        self.lengths = np.array(found)
        pieces = [(i, at, min(tokens, n - at)) for i, n in enumerate(found) for at in range(0, n, tokens)]
        rows = best_fit([count for _, _, count in pieces], tokens)
        self.rows: list[list[Piece]] = [[pieces[k] for k in row] for row in rows]

    def _counted(self, documents: int) -> list[int]:
        """The tokens of each document, which are all read."""
        if documents > MOST:
            why = f"packed() reads every document to count its tokens, and at most {MOST:,} of them"
            raise _wrong(f"the data of packed() says that it has {documents:,} documents", why, ("packed(lengths=…)    the tokens of each",))
        found, said = list[int](), time.monotonic() + PATIENCE
        for i in range(documents):
            found.append(len(self._document(i)[0]))
            if time.monotonic() > said:
                said = math.inf
                note = f"note  packed() reads {documents:,} documents to count their tokens, {i + 1:,} so far: packed(lengths=…) saves that"
                print(note, file=sys.stderr, flush=True)
        return found

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        ids = torch.full((self.tokens,), self.pad)
        targets, positions, at = torch.full((self.tokens,), IGNORED), torch.arange(self.tokens), 0
        for number, first, count in self.rows[i]:
            tokens, wanted = self._document(number)
            if len(tokens) != self.lengths[number]:
                told = f"it had {self.lengths[number]} tokens when rows were made, and now {len(tokens)}"
                raise _wrong(f"document {number} of packed data has another length", told)
            ids[at : at + count] = tokens[first : first + count]
            targets[at : at + count] = wanted[first : first + count]
            if not self.shifted:
                targets[at] = IGNORED  # what it follows is not there
            positions[at : at + count] = torch.arange(count)
            at += count
        positions[at:] = torch.arange(self.tokens - at)
        return {"input_ids": ids, "position_ids": positions}, targets

    def _document(self, i: int) -> tuple[Tensor, Tensor]:
        """(ids, targets) of a document, both [length]; targets are shifted where they are to be."""
        ids, targets, own = _parts(in_tensors(self.data[i]))
        if ids.dim() != 1 or ids.shape != targets.shape or ids.is_floating_point():
            told = f"ids have shape {list(ids.shape)}, targets {list(targets.shape)}"
            raise _wrong(f"document {i} of packed data is not a row of tokens", told)
        if own is self.shifted:
            ends = targets.new_full((min(1, len(targets)),), IGNORED)
            targets = torch.cat([targets[1:], ends] if own else [ends, targets[:-1]])
        return ids, targets


def _parts(sample: object) -> tuple[Tensor, Tensor, bool]:
    """(ids, labels, whether a label is that of its own place) of a document."""
    if isinstance(sample, Mapping) and "input_ids" in sample:
        label = next((name for name in LABELS if name in sample), "input_ids")
        return torch.as_tensor(sample["input_ids"]), torch.as_tensor(sample[label]), True
    pair = pair_of(sample)
    if pair is None or isinstance(pair[0], Mapping):
        told = "a document is a dict with input_ids, or a pair of ids and targets"
        raise _wrong(f"a sample of packed data is a {type(sample).__name__}", told)
    return torch.as_tensor(pair[0]), torch.as_tensor(pair[1]), False


def _wrong(what: str, why: str = "", fix: tuple[str, ...] = ()) -> PlaitError:
    return PlaitError(Problem("J029", what, why=why, where="plait.packed(…)", fix=fix))
