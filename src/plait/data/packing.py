"""Packing of several documents into rows of a fixed number of tokens, so that only the end of a row is padded.

Rows are filled by best-fit-decreasing, a pure function of the documents' lengths, so every rank and every run has the same rows. A document
longer than a row is split into pieces, each of which counts as a document; no token is dropped. `position_ids` restart with each
document. They are sufficient for a model to separate documents:

Hugging Face's decoders   derive the mask from `position_ids` if no `attention_mask` is given (transformers 5, with
                          sdpa, eager and flex_attention; flash attention splits the row by them)
a custom model            scaled_dot_product_attention(q, k, v, attn_mask=plait.document_mask(position_ids))

The loss and gradients of a row then equal those of its documents, if the loss is a mean over counted tokens (`Job.weight`). Quantities per
row, such as a learned position beyond the longest document, have no meaning here.
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
from plait.data.batch import LABEL_NAMES, MapStyle, lists_to_tensors, split_pair

MAX_DOCUMENTS = 100_000_000
"""Maximum number of documents that are read to count their tokens."""
NOTE_AFTER_S = 10.0
"""Seconds of counting after which a note is printed."""
IGNORED = -100
"""Target of tokens that are not predicted, as in `torch.nn.functional.cross_entropy`."""
Piece = tuple[int, int, int]
"""(number of a document, its first token, number of tokens)."""


def packed(
    data: MapStyle, tokens: int, *, lengths: Sequence[int] | None = None, shifted: bool = True, pad: int = 0
) -> "PackedRows":
    """Pack the documents of a tokenized data set into rows of exactly `tokens` tokens.

    `data`: access by index. A document is a dict with input_ids [length] and labels [length] (default: input_ids), as in Hugging Face, where
    a label belongs to its own token. Or it is a pair (ids [length], targets [length]), where a target is the prediction at its
    position. `lengths`: the tokens of each document (None: all are read once to count them).

    A row is ({"input_ids": [tokens], "position_ids": [tokens]}, targets [tokens]), all int64. With `shifted`, a target is the next token of
    the document, as plait's losses expect, and the last position of a document has none. Otherwise targets are labels of their own
    positions, for a model or loss that shifts them itself, and the first position of a document has none. A missing target is -100,
    also at the end of a row, which is filled with `pad`. The weight of a loss is then
    ``Job(weight=lambda targets: (targets != -100).sum())``. J029 for an invalid document.

    """
    return PackedRows(data, tokens, lengths, shifted=shifted, pad=pad)


def document_mask(position_ids: Tensor) -> Tensor:
    """Attention mask of packed rows: a query sees the keys of its own document up to itself.

    `position_ids` [batch, tokens], which restart with each document. Returns bool [batch, 1, tokens, tokens], True for visible
    keys: the `attn_mask` of `torch.nn.functional.scaled_dot_product_attention`, instead of `is_causal`.

    """
    begins = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1) != 1
    document, place = begins.cumsum(-1), torch.arange(position_ids.shape[-1], device=position_ids.device)
    return ((document[:, :, None] == document[:, None, :]) & (place[:, None] >= place))[:, None]


def best_fit(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Assign lengths to rows by number: longest first, each into the fullest row with enough room.

    >>> best_fit([3, 6, 2, 4, 5], 8)
    [[1, 2], [4, 0], [3]]

    """
    rows, room = list[list[int]](), dict[int, list[int]]()
    known = list[int]()  # the free sizes of rows, sorted
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
    """Rows of packed documents, with access by index."""

    def __init__(self, data: MapStyle, tokens: int, lengths: Sequence[int] | None, *, shifted: bool, pad: int):
        if type(tokens) is not int or tokens < 1:
            raise _j029_error(f"packed(tokens={tokens!r}) is not a whole number ≥ 1")
        self.data, self.tokens, self.shifted, self.pad = data, tokens, shifted, pad
        found = self._count_tokens(len(data)) if lengths is None else [int(n) for n in lengths]
        if len(found) != len(data) or not found or min(found) < 0:
            raise _j029_error(f"packed(lengths) has {len(found)} lengths, and the data {len(data)} documents")
        self.lengths = np.array(found)
        pieces = [(i, at, min(tokens, n - at)) for i, n in enumerate(found) for at in range(0, n, tokens)]
        rows = best_fit([count for _, _, count in pieces], tokens)
        self.rows: list[list[Piece]] = [[pieces[k] for k in row] for row in rows]

    def _count_tokens(self, documents: int) -> list[int]:
        """Read all documents and return their numbers of tokens."""
        if documents > MAX_DOCUMENTS:
            why = f"packed() reads every document to count its tokens, up to {MAX_DOCUMENTS:,} documents"
            raise _j029_error(f"the data of packed() has {documents:,} documents", why, ("packed(lengths=…)    the tokens of each",))
        found, said = list[int](), time.monotonic() + NOTE_AFTER_S
        for i in range(documents):
            found.append(len(self._read_document(i)[0]))
            if time.monotonic() > said:
                said = math.inf
                note = f"note  packed() reads {documents:,} documents to count their tokens, {i + 1:,} so far (packed(lengths=…) skips this)"
                print(note, file=sys.stderr, flush=True)
        return found

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        ids = torch.full((self.tokens,), self.pad)
        targets, positions, at = torch.full((self.tokens,), IGNORED), torch.arange(self.tokens), 0
        for number, first, count in self.rows[i]:
            tokens, wanted = self._read_document(number)
            if len(tokens) != self.lengths[number]:
                told = f"it had {self.lengths[number]} tokens when the rows were packed, and now {len(tokens)}"
                raise _j029_error(f"document {number} of packed data has another length", told)
            ids[at : at + count] = tokens[first : first + count]
            targets[at : at + count] = wanted[first : first + count]
            if not self.shifted:
                targets[at] = IGNORED  # its previous token is missing
            positions[at : at + count] = torch.arange(count)
            at += count
        positions[at:] = torch.arange(self.tokens - at)
        return {"input_ids": ids, "position_ids": positions}, targets

    def _read_document(self, i: int) -> tuple[Tensor, Tensor]:
        """Return (ids, targets) of a document, both [length], with targets shifted if `shifted` is set."""
        ids, targets, own = _split_document(lists_to_tensors(self.data[i]))
        if ids.dim() != 1 or ids.shape != targets.shape or ids.is_floating_point():
            told = f"ids have shape {list(ids.shape)}, targets {list(targets.shape)}"
            raise _j029_error(f"document {i} of packed data is not a row of tokens", told)
        if own is self.shifted:
            ends = targets.new_full((min(1, len(targets)),), IGNORED)
            targets = torch.cat([targets[1:], ends] if own else [ends, targets[:-1]])
        return ids, targets


def _split_document(sample: object) -> tuple[Tensor, Tensor, bool]:
    """Return (ids, labels, whether a label belongs to its own position) of a document."""
    if isinstance(sample, Mapping) and "input_ids" in sample:
        label = next((name for name in LABEL_NAMES if name in sample), "input_ids")
        return torch.as_tensor(sample["input_ids"]), torch.as_tensor(sample[label]), True
    pair = split_pair(sample)
    if pair is None or isinstance(pair[0], Mapping):
        told = "a document is a dict with input_ids, or a pair of ids and targets"
        raise _j029_error(f"a sample of packed data is a {type(sample).__name__}", told)
    return torch.as_tensor(pair[0]), torch.as_tensor(pair[1]), False


def _j029_error(what: str, why: str = "", fix: tuple[str, ...] = ()) -> PlaitError:
    return PlaitError(Problem("J029", what, why=why, where="plait.packed(…)", fix=fix))
