"""DTensor: layers sharded by `parallelize_module`, alone or with fully_shard (`--data 2`). `--wrong NAME` makes a mistake."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

options = argparse.ArgumentParser()
options.add_argument("--batch-size", type=int, default=16)
options.add_argument("--data", type=int, default=1)
options.add_argument("--wrong", default="", choices=("", "other-rows", "sums-twice", "no-sampler", "clips-shards"))
options.add_argument("--losses", default="")
given = options.parse_args()
ranks = int(os.environ.get("WORLD_SIZE", "1"))


class Block(nn.Module):
    """Two sharded layers between two that are not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.narrow, self.last = nn.Linear(10, 16), nn.Linear(16, 48), nn.Linear(48, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x + self.narrow(F.gelu(self.wide(x))))


torch.manual_seed(0)
model = Block()
replica, replicas = 0, 1
if ranks > 1:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (given.data, ranks // given.data), mesh_dim_names=("data", "layers"))
    parallelize_module(model, mesh["layers"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    if given.data > 1:
        fully_shard(model, mesh=mesh["data"])
    replica, replicas = mesh.get_local_rank("data"), given.data
points = torch.randn(150, 10, generator=torch.Generator().manual_seed(4))
data = TensorDataset(points, (points[:, 0] > 0).long() + (points[:, 1] > 0).long())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
if given.wrong == "other-rows":
    replica, replicas = dist.get_rank() if ranks > 1 else 0, ranks
sampler = DistributedSampler(data, replicas, replica) if replicas > 1 and given.wrong != "no-sampler" else None
loader = DataLoader(data, given.batch_size, sampler=sampler, shuffle=sampler is None, generator=torch.Generator().manual_seed(6))
for epoch in range(3):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if given.wrong == "sums-twice" and ranks > 1:
            for p in (p for p in model.parameters() if not hasattr(p.grad, "to_local")):
                dist.all_reduce(p.grad)
        if given.wrong == "clips-shards":
            parts = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
            norm = sum(float(part.square().sum()) for part in parts) ** 0.5
            for part in parts:
                part.mul_(min(1.0, 0.2 / norm))
        optimizer.step()
        optimizer.zero_grad()
        if given.losses and (ranks == 1 or dist.get_rank() == 0):
            print(loss.item().hex(), file=open(given.losses, "a"))  # noqa: SIM115
if ranks > 1:
    dist.destroy_process_group()
