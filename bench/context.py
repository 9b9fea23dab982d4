"""Compares context parallelism with one device and torch's context_parallel: time and memory of a step for growing sequences.

    python bench/context.py                      one device, cp=2 and cp=4, ring and ulysses, at growing lengths
    python bench/context.py --lengths 131072 --plans cp=4 --depth 2     one step of a very long sequence

Every variant runs in its own forked processes, with one thread each. On fewer cores than ranks, only the memory is meaningful.
One warm-up step at a short length precedes `--steps` steps of one sample. Time is the median. Memory is the growth of the
resident set during the steps, on the rank with the largest growth. torch's `context_parallel` has no attention kernel for
CPUs; here it uses torch's own ring template over the CPU's flash kernel.
"""

import argparse
import json
import statistics
import sys
import threading
from collections.abc import Callable
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import plait
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place

WORDS = 64


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(h)).chunk(3, -1))
        h = h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return h + self.mlp(self.norm2(h))


class GPT(nn.Module):
    def __init__(self, depth: int, width: int, heads: int):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.head = nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Rows:
    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        row = torch.randint(WORDS, (self.length + 1,), generator=torch.Generator().manual_seed(i))
        return row[:-1], row[1:]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def memory(reset: bool = False) -> int:
    """Return the peak bytes of the process since the last reset."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))


def measured(step: Callable[[int], float], ranks: int, length: int, steps: int) -> dict[str, Any]:
    """Measure `step(length)`, which returns its seconds."""
    step(64 * ranks)
    before = memory(reset=True)
    times = [step(length) for _ in range(steps)]
    return {"seconds": statistics.median(times), "bytes": memory() - before}


def _alive(place: Place) -> None:
    """Report progress: a step that is a thousand times as long as the first one looks like a hang."""
    while True:
        place.beat(0, "forward")
        sleep(5.0)


def ours(plan: str, shape: tuple[int, int, int], length: int, steps: int) -> list[dict[str, Any]]:
    def rank(place: Place) -> dict[str, Any]:
        torch.set_num_threads(1)
        job = plait.Job(
            model=lambda: GPT(*shape), loss=loss, data=lambda: Rows(length), batch=1, steps=1000,
            optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        )  # fmt: skip
        with Engine(job, Plan.parse(plan), device="cpu", place=place) as engine:
            batches = engine.batches()

            def step(length: int) -> float:
                engine.rank_model.setup.data.length = length
                batch = next(batches)
                began = perf_counter()
                engine.step(batch)
                return perf_counter() - began

            threading.Thread(target=_alive, args=(place,), daemon=True).start()
            return measured(step, engine.plan.cp, length, steps)

    return fork.run_ranks(rank, Plan.parse(plan).world, fork.Listener(lambda *_: None))


def torchs(ranks: int, shape: tuple[int, int, int], length: int, steps: int) -> list[dict[str, Any]]:
    """Run torch.distributed.tensor.experimental.context_parallel, with gradients summed over the ranks by hand."""

    def rank(place: Place) -> dict[str, Any]:
        torch.set_num_threads(1)
        place.connect(torch.device("cpu"))
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel

        _handlers()
        mesh = init_device_mesh("cpu", (ranks,))
        torch.manual_seed(0)
        model = GPT(*shape)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        row = iter(range(1000))

        def step(length: int) -> float:
            x, y = (t[None].clone() for t in Rows(length)[next(row)])
            began = perf_counter()
            with context_parallel(mesh, buffers=[x, y], buffer_seq_dims=[1, 1]):
                (loss(model(x), y) / ranks).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return perf_counter() - began

        return measured(step, ranks, length, steps)

    return fork.run_ranks(rank, ranks, fork.Listener(lambda *_: None))


def _handlers() -> None:
    """Register torch's ring over the CPU's attention kernel, for which torch has no rule."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    aten = torch.ops.aten
    local = lambda t: t._local_tensor if isinstance(t, DTensor) else t  # noqa: E731

    def wrapped(found: Any, like: DTensor) -> tuple[Tensor, ...]:
        return tuple(DTensor.from_local(t, like.device_mesh, like.placements, run_check=False) for t in found)

    def forward(op: Any, args: Any, kwargs: Any) -> Any:
        q, k, v = map(local, args[:3])
        causal = args[4] if len(args) > 4 else kwargs.get("is_causal", False)
        kernel, group = aten._scaled_dot_product_flash_attention_for_cpu, args[0].device_mesh.get_group()
        made = ring._templated_ring_attention(
            group, 2, kernel, q, k, v, is_causal=causal, dropout_p=0.0, scale=kwargs.get("scale")
        )
        return wrapped(made, args[0])

    def backward(op: Any, args: Any, kwargs: Any) -> Any:
        grad, q, k, v, out, lse, _, causal = map(local, args[:8])

        def kernel(*, grad_out, query, key, value, out, logsumexp, is_causal, **_: Any) -> Any:
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=kwargs.get("scale")
            )

        group = args[1].device_mesh.get_group()
        made = ring._templated_ring_attention_backward(
            group, 2, kernel, grad, "grad_out", q, k, v, out, lse, is_causal=causal
        )
        return wrapped(made, args[1])

    ring.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu.default] = forward
    ring.custom_ops[aten._scaled_dot_product_flash_attention_for_cpu_backward.default] = backward


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--plans", nargs="+", default=["dp=1", "cp=2", "cp=4", "cp=4 cp_method=ulysses", "torch 4"])
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    shape = (given.depth, given.width, given.heads)
    print(f"{'plan':<24}{'length':>8}{'seconds':>10}{'MiB':>9}")
    for length in given.lengths:
        for plan in given.plans:
            if plan.startswith("torch"):
                rows = torchs(int(plan.split()[1]), shape, length, given.steps)
            else:
                rows = ours(plan, shape, length, given.steps)
            seconds, size = max(r["seconds"] for r in rows), max(r["bytes"] for r in rows)
            print(f"{plan:<24}{length:>8}{seconds:>10.2f}{size / 2**20:>9.1f}", flush=True)
            print(json.dumps({"plan": plan, "length": length, "ranks": rows}), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
