"""Models whose forward pass fake tensors cannot follow: nested or sparse tensors, code that reads memory, operators without a fake rule."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import plait

WIDTH = 16


class Body(nn.Module):
    """Three layers with dropout. `look` is applied to the first layer's output, x: [batch, width]."""

    def __init__(self, look: Callable[["Body", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.drop, self.look = nn.Dropout(0.2), look
        self.tables = [(torch.eye(WIDTH) + torch.eye(WIDTH).roll(k, 0)).to_sparse() for k in (1, 2)]

    def forward(self, x: Tensor) -> Tensor:
        h = self.look(self, torch.tanh(self.first(x)))
        return self.head(self.drop(torch.tanh(self.second(h))))


def rows(h: Tensor) -> list[Tensor]:
    """A nested tensor; each sample's values define its number of rows: [2 to 4, 16]."""
    return [row[: 2 + int(row[0] > 0) + int(row[1] > 0), None].expand(-1, WIDTH) for row in h]


def jagged(body: Body, h: Tensor) -> Tensor:
    packed = body.drop(body.second(torch.nested.as_nested_tensor(rows(h), layout=torch.jagged)))
    return torch.stack([row.mean(0) for row in packed.unbind()])


def nested(body: Body, h: Tensor) -> Tensor:
    packed = body.drop(torch.relu(body.second(torch.nested.as_nested_tensor([row.clone() for row in rows(h)]))))
    return packed.to_padded_tensor(0.0).sum(1)


def memory(body: Body, h: Tensor) -> Tensor:
    assert h.data_ptr()
    return h


def in_numpy(body: Body, h: Tensor) -> Tensor:
    order = torch.from_numpy(h.detach().numpy().argsort(1))
    return torch.gather(h, 1, order)


def values(body: Body, h: Tensor) -> Tensor:
    counts = [1 + int(row[0] > 0) for row in h]
    many = body.second(h.repeat_interleave(torch.tensor(counts), 0))
    return torch.stack([part.mean(0) for part in many.split(counts)])


def masked(body: Body, h: Tensor) -> Tensor:
    chosen = h[:, 0] > 0
    h = h.index_put((chosen,), torch.tanh(body.second(h[chosen])))
    return h.index_add(0, (h[:, 1] > 0).nonzero()[:, 0], h[h[:, 1] > 0])


def tables(body: Body, h: Tensor) -> Tensor:
    for table in body.tables:
        h = 0.5 * torch.sparse.mm(table.to(h.dtype), h.T).T
    return h


def sparse(body: Body, h: Tensor) -> Tensor:
    at = torch.arange(len(h))
    diagonal = torch.sparse_coo_tensor(torch.stack([at, at]), h[:, 0], (len(h), len(h)), check_invariants=True)
    return torch.sparse.mm(diagonal.coalesce(), h) + h


@cache
def operator() -> Callable[[Tensor], Tensor]:
    """An operator without a rule for fake tensors."""

    @torch.library.custom_op("plait_tests::cube", mutates_args=())
    def cube(x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() ** 3).clone()

    cube.register_autograd(
        lambda ctx, g: 3 * g * ctx.saved_tensors[0] ** 2,
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return cube


def custom(body: Body, h: Tensor) -> Tensor:
    return operator()(h)


KINDS = {f.__name__: f for f in (jagged, nested, memory, in_numpy, values, masked, tables, sparse, custom)}


def job(kind: str) -> plait.Job:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(40, 8, generator=g)
    adam = lambda p: torch.optim.AdamW(p, lr=1e-2)  # noqa: E731
    data = lambda: TensorDataset(x, x[:, :4].argmax(1))  # noqa: E731
    return plait.Job(
        model=lambda: Body(KINDS[kind]), loss=F.cross_entropy, data=data, optimizer=adam, batch=8, steps=3, clip=1.0
    )
