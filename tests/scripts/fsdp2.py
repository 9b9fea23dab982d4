"""FSDP2 (fully_shard) on a small decoder. `--wrong NAME` makes a mistake."""

import argparse
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WRONG = ("", "clips-shards", "scheduler", "no-sampler", "times-ranks", "short-rank", "never-summed")
options = argparse.ArgumentParser()
options.add_argument("--batch-size", type=int, default=16)
options.add_argument("--wrong", default="", choices=WRONG)
options.add_argument("--accumulation", type=int, default=1)
options.add_argument("--compile", action="store_true")
options.add_argument("--workers", type=int, default=0)
options.add_argument("--bf16", action="store_true")
options.add_argument("--hybrid", action="store_true", help="shards inside of pairs, replicas across")
options.add_argument("--losses", default="")
given = options.parse_args()
ranks = int(os.environ.get("WORLD_SIZE", "1"))


class Sentences(Dataset):
    """Rows of tokens."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 40, (150, 13), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.tokens[index, :-1], "next": self.tokens[index, 1:]}


class Layer(nn.Module):
    """A layer of a decoder."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.wide, self.narrow, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, length = self.before(x), x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = x + self.attention(hidden, hidden, hidden, attn_mask=mask, need_weights=False)[0]
        return x + self.dropout(self.narrow(F.silu(self.wide(self.after(x)))))


class Decoder(nn.Module):
    """Two layers, with one matrix for both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(40, 32), nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def clip_shards(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Clips by the norm of the rank's own shards."""
    parts = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in parameters]
    norm = sum(float(part.square().sum()) for part in parts) ** 0.5
    for part in parts:
        part.mul_(min(1.0, limit / norm))


clip = clip_shards if given.wrong == "clips-shards" else nn.utils.clip_grad_norm_
torch.manual_seed(0)
model = Decoder()
if ranks > 1:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (ranks // 2, 2) if given.hybrid else (ranks,), mesh_dim_names=("replicas", "shards")[-1 - given.hybrid :])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
rank = dist.get_rank() if ranks > 1 else 0
called = torch.compile(model, backend="aot_eager") if given.compile else model
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 9)
data = Sentences()
sampler = DistributedSampler(data) if ranks > 1 and given.wrong != "no-sampler" else None
loader = DataLoader(data, given.batch_size, sampler=sampler, shuffle=sampler is None, num_workers=given.workers)
for epoch in range(3):
    if sampler is not None:
        sampler.set_epoch(epoch)
    for i, batch in enumerate(loader):
        if given.wrong == "short-rank" and rank == 1 and i == 1:
            break
        ends_step = (i + 1) % given.accumulation == 0
        if ranks > 1:
            model.set_requires_gradient_sync(ends_step and given.wrong != "never-summed")
        with torch.autocast("cpu", torch.bfloat16, enabled=given.bf16):
            loss = F.cross_entropy(called(batch["tokens"]).flatten(0, 1), batch["next"].flatten())
        (loss * ranks if given.wrong == "times-ranks" else loss / given.accumulation).backward()
        if not ends_step:
            continue
        clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for _ in range(ranks if given.wrong == "scheduler" else 1):
            schedule.step()
        if given.losses and rank == 0:
            print(loss.item().hex(), file=open(given.losses, "a"))  # noqa: SIM115
if ranks > 1:
    dist.destroy_process_group()
