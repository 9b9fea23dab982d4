"""PowerSGD: the sum of the ranks' matrices, as far as it lies in a few directions that all ranks find together.

With M the matrix of a rank and Q the same thin matrix on all:

    P = Σ M Q          the first message; its columns are made orthonormal
    Q = Σ Mᵀ P         the second, and what the next step begins with (warm start)
    P Qᵀ               the sum; a rank's share of it is P (Mᵀ P)ᵀ, and what is left of its M stays with it

A column of P that has next to nothing in it is left out: the matrices have no more directions, or none along that column
of Q. To scale it to length 1 would make a direction of rounding. Its column of Q begins anew, with the numbers of the first step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from plait.parallel.compression.messages import summed, wide
from plait.parallel.compression.price import matrix_shape
from plait.randomness.distributions import key
from plait.randomness.philox import bits

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
