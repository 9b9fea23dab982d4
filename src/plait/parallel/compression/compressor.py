"""Sums of named tensors over any group of ranks, compressed, with error feedback.

With g the tensor that a rank gives and e its residual of the sum before, x = g + e is what it has to send and C(x) what
it sends. The sum is Σ C(x), and e = x − C(x) stays: nothing is lost, it arrives later. So after any number of sums

    Σ of all sums + Σ of the ranks' residuals = Σ of all that was given

What a sum leaves is taken over by `commit`, and not before: a step that is made again, or left out because it is not
finite, leaves no trace. Nothing here knows what is summed: gradients of copies, or how far the weights of replica groups moved.

PowerSGD: the sum of the ranks' matrices, as far as it lies in a few directions that all ranks find together.

With M the matrix of a rank and Q the same thin matrix on all:

    P = Σ M Q          the first message; its columns are made orthonormal
    Q = Σ Mᵀ P         the second, and what the next step begins with (warm start)
    P Qᵀ               the sum; a rank's share of it is P (Mᵀ P)ᵀ, and what is left of its M stays with it

A column of P that has next to nothing in it is left out: the matrices have no more directions, or none along that column
of Q. To scale it to length 1 would make a direction of rounding. Its column of Q begins anew, with the numbers of the first step.

Sums of tensors that each rank rounds before it sends them: to bf16, or to whole numbers from −127 to 127 times a scale.

Rounded numbers do not add up inside an all-reduce: the sum of two bf16 numbers is no bf16 number, and int8 numbers have
another scale on every rank. So the ranks' numbers are gathered as they are, and every rank adds them up in the wide
format, in the order of the ranks. The sum has no second rounding, and the same bits on every rank.

What compressed sums send, in bytes, from shapes alone.

[Note: Messages]
Many tensors in few messages: gathered from every rank as they are, or summed.
"""

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.randomness.distributions import key
from plait.randomness.philox import bits

MESSAGE_BYTES = 8 << 20
"""A message takes another tensor as long as it has fewer bytes than this."""


def size_of(group: ProcessGroup | None) -> int:
    """Ranks of a group; None is this rank alone."""
    return 1 if group is None else group.size()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The format in which tensors of this format are added up: their own, of 16 bits fp32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def batches(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of the tensors that share a message: those of one format, in their order."""
    kinds: dict[torch.dtype, list[str]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault(tensor.dtype, []).append(name)
    for names in kinds.values():
        message, size = list[str](), 0
        for name in names:
            message.append(name)
            size += tensors[name].nbytes
            if size >= MESSAGE_BYTES:
                yield message
                message, size = [], 0
        if message:
            yield message


def gathered(tensors: Mapping[str, Tensor], group: ProcessGroup | None) -> Iterator[tuple[str, list[Tensor]]]:
    """(name, that tensor of every rank in the order of the ranks), message by message. Sent as bytes, whatever the format."""
    for names in batches(tensors):
        mine = torch.cat([tensors[name].reshape(-1) for name in names])
        rows = [mine]
        if group is not None:
            sent = mine.view(torch.uint8)
            arrived = [torch.empty_like(sent) for _ in range(group.size())]
            dist.all_gather(arrived, sent, group=group)
            rows = [row.view(mine.dtype) for row in arrived]
        each = [row.split([tensors[name].numel() for name in names]) for row in rows]
        for name, parts in zip(names, zip(*each)):
            yield name, [part.view(tensors[name].shape) for part in parts]


def summed(tensors: Mapping[str, Tensor], group: ProcessGroup | None) -> dict[str, Tensor]:
    """The sum of each tensor over the ranks, on every rank."""
    found: dict[str, Tensor] = {}
    for names in batches(tensors):
        flat = torch.cat([tensors[name].reshape(-1) for name in names])
        if group is not None:
            dist.all_reduce(flat, group=group)
        parts = flat.split([tensors[name].numel() for name in names])
        found |= {name: part.view(tensors[name].shape) for name, part in zip(names, parts)}
    return found


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


MOST = 127
"""The largest whole number that is sent."""


def sum_bf16(given: Mapping[str, Tensor], group: ProcessGroup | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of each tensor the sum over the ranks of what they sent, and what this rank could not send."""
    sent = {name: x.to(torch.bfloat16) for name, x in given.items()}
    sums = {name: _added([row.to(given[name].dtype) for row in rows]) for name, rows in gathered(sent, group)}
    return sums, {name: x - sent[name].to(x.dtype) for name, x in given.items()}


def sum_int8(given: Mapping[str, Tensor], group: ProcessGroup | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same of whole numbers. The scale of a tensor is its largest number over 127, of each rank its own."""
    if not given:
        return {}, {}
    scales = {name: scale_of(x) for name, x in given.items()}  # sent as float64, which holds them all
    sent = {name: whole_numbers(x, scales[name]) for name, x in given.items()}
    each = dict(gathered({name: scale.double() for name, scale in scales.items()}, group))
    sums = {
        name: _added([_times(row, scale, given[name].dtype) for row, scale in zip(rows, each[name])])
        for name, rows in gathered(sent, group)
    }
    return sums, {name: x - _times(sent[name], scales[name], x.dtype) for name, x in given.items()}


def scale_of(x: Tensor) -> Tensor:
    """What one of the whole numbers stands for."""
    return x.abs().max() / MOST if x.numel() else x.new_zeros(())


def whole_numbers(x: Tensor, scale: Tensor) -> Tensor:
    """The nearest whole numbers; zeros where all of the tensor is zero."""
    return torch.round(x / torch.where(scale > 0, scale, 1.0)).to(torch.int8)


def _times(row: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return row.to(dtype) * scale.to(dtype)


def _added(rows: list[Tensor]) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


LEAST = 1e-4
"""A column is left out below this share of what it could be: the matrices' sizes times its column's length."""


def first_factor(name: str, like: Tensor, seed: int, rank: int) -> Tensor:
    """Q before the first step: keyed by seed and name, and so the same on every rank and under every layout."""
    columns = matrix_shape(tuple(like.shape))[1]
    drawn = torch.from_numpy(bits(key(seed, "powersgd", name), 0, columns * rank).astype("float64"))
    uniform = (drawn + 0.5) * 2.0**-32 - 0.5
    return uniform.view(columns, rank).to(like.device, wide(like.dtype))


def sum_thin(
    given: Mapping[str, Tensor], factors: Mapping[str, Tensor], first: Mapping[str, Tensor], group: ProcessGroup | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """(sums, what this rank keeps, factors of the next step). What has no factor is summed as it is."""
    matrices = {name: x.reshape(matrix_shape(tuple(x.shape))) for name, x in given.items() if name in factors}
    sent = {name: x for name, x in given.items() if name not in factors}
    for name, matrix in matrices.items():
        thin = matrix @ factors[name]
        sent[f"P {name}"] = torch.cat([thin.reshape(-1), torch.linalg.vector_norm(matrix).reshape(1)])
    arrived = summed(sent, group)
    bases, kept = dict[str, Tensor](), dict[str, Tensor]()
    for name, matrix in matrices.items():
        message, factor = arrived.pop(f"P {name}"), factors[name]
        lengths = torch.linalg.vector_norm(factor, dim=0) * message[-1]
        bases[name], kept[name] = orthonormal(message[:-1].view(len(matrix), -1), LEAST * lengths)
    shares = {name: matrix.T @ bases[name] for name, matrix in matrices.items()}
    thin = summed(shares, group)
    residuals, then = dict[str, Tensor](), dict[str, Tensor]()
    for name, matrix in matrices.items():
        shape, basis = given[name].shape, bases[name]
        arrived[name] = (basis @ thin[name].T).view(shape)
        residuals[name] = (matrix - basis @ shares[name].T).view(shape)
        then[name] = torch.where(kept[name], thin[name], first[name])
    return arrived, residuals, then


def orthonormal(thin: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """The columns made orthonormal, each without its share in those before it, taken off twice (Gram–Schmidt); zeros where no
    more than `least` is left. And which are left."""
    columns, kept = list[Tensor](), list[Tensor]()
    for j in range(thin.shape[1]):
        column = thin[:, j]
        if columns:
            before = torch.stack(columns, 1)
            for _ in range(2):
                column = column - before @ (before.T @ column)
        length = torch.linalg.vector_norm(column)
        there = ~(length <= least[j])  # what is not a number stays, and is found by those who look for such
        columns.append(torch.where(there, column / torch.where(there, length, 1.0), 0.0))
        kept.append(there)
    return torch.stack(columns, 1), torch.stack(kept)


RESIDUAL, FACTOR = "residual", "factor"


class Compressor:
    """Sums tensors that are named and shaped as those of `like`, as `kind` (bf16, int8 or powersgd) sends them.

    `seed` and `rank` are for powersgd: of the first factors, and how many columns they have. All ranks make it alike.
    """

    def __init__(self, kind: str, like: Mapping[str, Tensor], seed: int = 0, rank: int = 2):
        self.kind = kind
        thin, self.like = kind == "powersgd", dict(like)
        chosen = {n: t for n, t in like.items() if not thin or compressible(tuple(t.shape), rank)}
        self.residuals = {n: torch.zeros_like(t, dtype=wide(t.dtype), requires_grad=False) for n, t in chosen.items()}
        """What this rank has not sent yet, by name."""
        self.first = {n: first_factor(n, t, seed, rank) for n, t in chosen.items()} if thin else {}
        self.factors = dict(self.first)
        """Of powersgd what the next sum begins with: the same on all ranks."""
        self._next: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}

    @torch.no_grad()
    def sum(self, given: Mapping[str, Tensor | None], group: ProcessGroup | None) -> dict[str, Tensor]:
        """The sum of each tensor over the ranks of the group, on all of them. They give the same names in the same order;
        None gives nothing, and sends what is left from before."""
        ready = {name: self._ready(name, tensor) for name, tensor in given.items()}
        if self.kind == "powersgd":
            mine = {name: f for name, f in self.factors.items() if name in ready}
            sums, residuals, factors = sum_thin(ready, mine, self.first, group)
        else:
            sums, residuals = (sum_int8 if self.kind == "int8" else sum_bf16)(ready, group)
            factors = {}
        self._next = residuals, factors
        return {name: sums[name].to(self.like[name].dtype) for name in given}

    def _ready(self, name: str, tensor: Tensor | None) -> Tensor:
        """What this rank has to send of a tensor."""
        tensor = torch.zeros_like(self.like[name], requires_grad=False) if tensor is None else tensor
        residual = self.residuals.get(name)
        return tensor.to(wide(tensor.dtype)) if residual is None else residual + tensor

    def forget(self, names: Iterable[str]) -> None:
        """What was summed of these does not count, and leaves nothing."""
        for left in self._next:
            for name in names:
                left.pop(name, None)

    def commit(self) -> None:
        """The last sum counts: take over what it left."""
        residuals, factors = self._next
        self.residuals.update(residuals)
        self.factors.update(factors)
        self._next = {}, {}

    def state(self) -> dict[str, Tensor]:
        """`residual/<name>`, which is this rank's own, and `factor/<name>`, the same on all ranks."""
        residuals = {f"{RESIDUAL}/{name}": t for name, t in self.residuals.items()}
        return residuals | {f"{FACTOR}/{name}": t for name, t in self.factors.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state; what is not in it is as before the first sum."""
        for name, t in self.residuals.items():
            self.residuals[name] = state.get(f"{RESIDUAL}/{name}", torch.zeros_like(t)).to(t.dtype)
        for name, t in self.first.items():
            self.factors[name] = state.get(f"{FACTOR}/{name}", t).to(t.dtype)
        self._next = {}, {}
