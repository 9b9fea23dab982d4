"""Sums of named tensors over a group of ranks, compressed, with error feedback.

Let g be a rank's tensor and e its residual from the previous sum. The rank has x = g + e to send, and sends C(x). The sum is Σ
C(x), and the new residual is e = x − C(x). So nothing is lost, it arrives later. After any number of sums:

    Σ of all results + Σ of the ranks' residuals = Σ of all inputs

`commit` accepts the residuals of the last sum. A step that is repeated, or skipped as non-finite, calls no `commit` and changes
nothing. The tensors may be gradients of replicas, or the weight changes of replica groups.

[Note: PowerSGD]
The sum of the ranks' matrices is approximated in a few directions that all ranks find together. With M the matrix of a rank, and
Q the same thin matrix on all ranks:

    P = Σ M Q          the first message; its columns are made orthonormal
    Q = Σ Mᵀ P         the second message, and the start of the next step (warm start)
    P Qᵀ               the sum; a rank's part of it is P (Mᵀ P)ᵀ, and the rest of its M becomes its residual

A column of P that is almost zero is dropped: the matrices have no further direction, or none along that column of Q. Scaled to
length 1, it would turn rounding errors into a direction. Its column of Q is reset to the values of the first step.

[Note: Rounding]
Tensors are rounded before they are sent: to bf16, or to integers from −127 to 127 times a scale. An all-reduce cannot add rounded
values: the sum of two bf16 values is not a bf16 value, and int8 values have another scale on every rank. So the values are
gathered, and every rank adds them in the wide format, in rank order. The sum is not rounded again, and has the same bits on every
rank.

[Note: Messages]
Many tensors are sent in few messages, which are gathered or summed. `count_sent_bytes` computes the traffic from shapes alone.
"""

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.randomness.distributions import make_philox_key
from plait.randomness.philox import draw_bits

MESSAGE_BYTES = 8 << 20
"""A message gets another tensor while it has fewer bytes than this."""


def get_group_size(group: ProcessGroup | None) -> int:
    """Return the number of ranks of a group; None is a group of this rank alone."""
    return 1 if group is None else group.size()


def get_sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the format for sums of tensors of `dtype`: fp32 for 16-bit formats, else `dtype` itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def batch_messages(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of tensors that are sent in one message: tensors of one format, in their order."""
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


def gather_tensors(tensors: Mapping[str, Tensor], group: ProcessGroup | None) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield (name, that tensor of every rank in rank order), message by message. Tensors are sent as bytes, whatever their format."""
    for names in batch_messages(tensors):
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


def sum_tensors(tensors: Mapping[str, Tensor], group: ProcessGroup | None) -> dict[str, Tensor]:
    """Sum each tensor over the ranks of a group, on every rank."""
    found: dict[str, Tensor] = {}
    for names in batch_messages(tensors):
        flat = torch.cat([tensors[name].reshape(-1) for name in names])
        if group is not None:
            dist.all_reduce(flat, group=group)
        parts = flat.split([tensors[name].numel() for name in names])
        found |= {name: part.view(tensors[name].shape) for name, part in zip(names, parts)}
    return found


MIN_MATRIX_DIMS = 2
"""Tensors with at least this number of dims are matrices for powersgd: the first dim, and all others flattened."""


def count_sent_bytes(kind: str, shapes: Iterable[tuple[int, ...]], ranks: int, itemsize: int = 4, rank: int = 2) -> float:
    """Bytes that a rank sends in one ring sum of tensors of these shapes.

    A gather passes through every rank: (N − 1) times a rank's own bytes, which grow with N. An all-reduce takes 2 (N − 1) / N
    times the bytes, at most twice.

        >>> [count_sent_bytes(kind, [(1000, 1000)], 2) for kind in ("none", "bf16", "int8", "powersgd")]
        [4000000.0, 2000000.0, 1000008.0, 16004.0]
        >>> [count_sent_bytes(kind, [(1000, 1000)], 8) / 1e6 for kind in ("none", "bf16", "int8")]
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
        return around * itemsize * sum(count_thin_values(shape, rank) for shape in shapes)
    return around * itemsize * sum(numbers)


def count_thin_values(shape: tuple[int, ...], rank: int) -> int:
    """Number of values that powersgd sends for a tensor: two thin matrices and a length, or the full tensor if that is smaller."""
    rows, columns = to_matrix_shape(shape)
    return rank * (rows + columns) + 1 if is_compressible(shape, rank) else rows * columns


def is_compressible(shape: tuple[int, ...], rank: int) -> bool:
    """Whether the two thin matrices of a tensor are smaller than the tensor."""
    rows, columns = to_matrix_shape(shape)
    return len(shape) >= MIN_MATRIX_DIMS and rank * (rows + columns) < rows * columns


def to_matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a tensor as a matrix: its first dim, and the product of the others."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


INT8_MAX = 127
"""The largest int8 value that is sent."""


def sum_bf16(given: Mapping[str, Tensor], group: ProcessGroup | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sum tensors rounded to bf16. Return the sums over the ranks, and this rank's residuals."""
    sent = {name: x.to(torch.bfloat16) for name, x in given.items()}
    sums = {name: _sum_rows([row.to(given[name].dtype) for row in rows]) for name, rows in gather_tensors(sent, group)}
    return sums, {name: x - sent[name].to(x.dtype) for name, x in given.items()}


def sum_int8(given: Mapping[str, Tensor], group: ProcessGroup | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sum tensors rounded to int8. Return the sums over the ranks, and this rank's residuals. A tensor's scale is its largest value
    over 127, for each rank."""
    if not given:
        return {}, {}
    scales = {name: compute_scale(x) for name, x in given.items()}  # sent as float64, which represents each scale exactly
    sent = {name: quantize_int8(x, scales[name]) for name, x in given.items()}
    each = dict(gather_tensors({name: scale.double() for name, scale in scales.items()}, group))
    sums = {
        name: _sum_rows([_dequantize(row, scale, given[name].dtype) for row, scale in zip(rows, each[name])])
        for name, rows in gather_tensors(sent, group)
    }
    return sums, {name: x - _dequantize(sent[name], scales[name], x.dtype) for name, x in given.items()}


def compute_scale(x: Tensor) -> Tensor:
    """Return the value that the integer 1 stands for."""
    return x.abs().max() / INT8_MAX if x.numel() else x.new_zeros(())


def quantize_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Round to the nearest integers; zeros if the full tensor is zero."""
    return torch.round(x / torch.where(scale > 0, scale, 1.0)).to(torch.int8)


def _dequantize(row: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return row.to(dtype) * scale.to(dtype)


def _sum_rows(rows: list[Tensor]) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


MIN_COLUMN_FRACTION = 1e-4
"""A column is dropped below this fraction of its largest possible length: the norm of the matrices times the length of its column of Q."""


def make_first_factor(name: str, like: Tensor, seed: int, rank: int) -> Tensor:
    """Make Q of the first step, keyed by seed and name: the same on every rank and under every layout."""
    columns = to_matrix_shape(tuple(like.shape))[1]
    drawn = torch.from_numpy(draw_bits(make_philox_key(seed, "powersgd", name), 0, columns * rank).astype("float64"))
    uniform = (drawn + 0.5) * 2.0**-32 - 0.5
    return uniform.view(columns, rank).to(like.device, get_sum_dtype(like.dtype))


def sum_powersgd(
    given: Mapping[str, Tensor], factors: Mapping[str, Tensor], first: Mapping[str, Tensor], group: ProcessGroup | None
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Sum matrices by PowerSGD, and tensors without a factor directly. Return (sums, this rank's residuals, factors of the next step)."""
    matrices = {name: x.reshape(to_matrix_shape(tuple(x.shape))) for name, x in given.items() if name in factors}
    sent = {name: x for name, x in given.items() if name not in factors}
    for name, matrix in matrices.items():
        thin = matrix @ factors[name]
        sent[f"P {name}"] = torch.cat([thin.reshape(-1), torch.linalg.vector_norm(matrix).reshape(1)])
    arrived = sum_tensors(sent, group)
    bases, kept = dict[str, Tensor](), dict[str, Tensor]()
    for name, matrix in matrices.items():
        message, factor = arrived.pop(f"P {name}"), factors[name]
        lengths = torch.linalg.vector_norm(factor, dim=0) * message[-1]
        bases[name], kept[name] = orthonormalize(message[:-1].view(len(matrix), -1), MIN_COLUMN_FRACTION * lengths)
    shares = {name: matrix.T @ bases[name] for name, matrix in matrices.items()}
    thin = sum_tensors(shares, group)
    residuals, then = dict[str, Tensor](), dict[str, Tensor]()
    for name, matrix in matrices.items():
        shape, basis = given[name].shape, bases[name]
        arrived[name] = (basis @ thin[name].T).view(shape)
        residuals[name] = (matrix - basis @ shares[name].T).view(shape)
        then[name] = torch.where(kept[name], thin[name], first[name])
    return arrived, residuals, then


def orthonormalize(thin: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormalize the columns by Gram–Schmidt, applied twice. A column whose remainder is at most `least` becomes zero.

    Also returns a flag per column: whether it was kept.
    """
    columns, kept = list[Tensor](), list[Tensor]()
    for j in range(thin.shape[1]):
        column = thin[:, j]
        if columns:
            before = torch.stack(columns, 1)
            for _ in range(2):
                column = column - before @ (before.T @ column)
        length = torch.linalg.vector_norm(column)
        there = ~(length <= least[j])  # NaN is kept, so that the non-finite check finds it
        columns.append(torch.where(there, column / torch.where(there, length, 1.0), 0.0))
        kept.append(there)
    return torch.stack(columns, 1), torch.stack(kept)


RESIDUAL, FACTOR = "residual", "factor"


class Compressor:
    """Sums tensors with the names and shapes of `templates`, sent as `kind` (bf16, int8 or powersgd).

    `seed` and `rank` are for powersgd: the seed of the first factors, and their number of columns. They are equal on all ranks.
    """

    def __init__(self, kind: str, templates: Mapping[str, Tensor], seed: int = 0, rank: int = 2):
        self.kind = kind
        thin, self.templates = kind == "powersgd", dict(templates)
        chosen = {n: t for n, t in templates.items() if not thin or is_compressible(tuple(t.shape), rank)}
        self.residuals = {n: torch.zeros_like(t, dtype=get_sum_dtype(t.dtype), requires_grad=False) for n, t in chosen.items()}
        """The part of each tensor that this rank has not sent yet, by name."""
        self.first_factors = {n: make_first_factor(n, t, seed, rank) for n, t in chosen.items()} if thin else {}
        self.factors = dict(self.first_factors)
        """The factors of powersgd with which the next sum starts: the same on all ranks."""
        self._next: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}

    @torch.no_grad()
    def sum(self, given: Mapping[str, Tensor | None], group: ProcessGroup | None) -> dict[str, Tensor]:
        """Sum each tensor over the ranks of the group, on all of them. All ranks pass the same names in the same order. For None, a
        rank sends only its residual."""
        ready = {name: self._add_residual(name, tensor) for name, tensor in given.items()}
        if self.kind == "powersgd":
            mine = {name: f for name, f in self.factors.items() if name in ready}
            sums, residuals, factors = sum_powersgd(ready, mine, self.first_factors, group)
        else:
            sums, residuals = (sum_int8 if self.kind == "int8" else sum_bf16)(ready, group)
            factors = {}
        self._next = residuals, factors
        return {name: sums[name].to(self.templates[name].dtype) for name in given}

    def _add_residual(self, name: str, tensor: Tensor | None) -> Tensor:
        """Add this rank's residual to a tensor."""
        tensor = torch.zeros_like(self.templates[name], requires_grad=False) if tensor is None else tensor
        residual = self.residuals.get(name)
        return tensor.to(get_sum_dtype(tensor.dtype)) if residual is None else residual + tensor

    def discard(self, names: Iterable[str]) -> None:
        """Discard the residuals of the last sum for these names."""
        for left in self._next:
            for name in names:
                left.pop(name, None)

    def commit(self) -> None:
        """Accept the residuals and factors of the last sum."""
        residuals, factors = self._next
        self.residuals.update(residuals)
        self.factors.update(factors)
        self._next = {}, {}

    def state(self) -> dict[str, Tensor]:
        """Return `residual/<name>` of this rank, and `factor/<name>`, which is the same on all ranks."""
        residuals = {f"{RESIDUAL}/{name}": t for name, t in self.residuals.items()}
        return residuals | {f"{FACTOR}/{name}": t for name, t in self.factors.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load a state. A missing entry is reset to its value before the first sum."""
        for name, t in self.residuals.items():
            self.residuals[name] = state.get(f"{RESIDUAL}/{name}", torch.zeros_like(t)).to(t.dtype)
        for name, t in self.first_factors.items():
            self.factors[name] = state.get(f"{FACTOR}/{name}", t).to(t.dtype)
        self._next = {}, {}
