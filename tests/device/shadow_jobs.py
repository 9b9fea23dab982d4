"""What runs on pretended devices: jobs, and things that a device does not take or has to be waited for."""

from dataclasses import replace
from typing import Any

import jobs
import jobs_context
import jobs_moe
import jobs_pipeline
import torch
import torch.distributed as dist
from torch import Tensor

import plait


def reading() -> plait.Job:
    """A loss that reads a number in every step."""
    job = jobs.mlp()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        scale = 1.0 if float(out.detach().mean()) > 1e9 else 2.0
        return scale * torch.nn.functional.mse_loss(out, y)

    return replace(job, loss=loss)


def evaluated() -> plait.Job:
    evaluate = plait.Evaluate(lambda: jobs.Numbers(7), lambda out, y: {"error": (out - y).abs()})
    return replace(jobs_pipeline.LISTED["deep"](), evaluate=evaluate)


JOBS = {
    "deep": evaluated,
    "mlp": jobs.mlp,
    "batch_norm": jobs.batch_norm,
    "words": jobs_pipeline.LISTED["root_gpt"],
    "attention": jobs_context.OWN["gpt"],
    "experts": jobs_moe.gpt,
    "reading": reading,
}


def mixed(rank: int) -> Any:
    return (torch.ones(3, device="cuda") + torch.ones(3)).tolist()


def host_collective(rank: int) -> Any:
    dist.all_reduce(torch.ones(3))


def strided(rank: int) -> Any:
    dist.all_reduce(torch.ones(2, 3, device="cuda").t())


def beyond(rank: int) -> Any:
    torch.cuda.set_device(17)


def summed(rank: int) -> Any:
    t = torch.ones(3, device="cuda") * (rank + 1)
    dist.all_reduce(t)
    host = torch.ones(1)
    dist.all_reduce(host)
    return [*t.tolist(), *host.tolist(), str(t.device)]


def waits(rank: int) -> Any:
    """One of each."""
    t = torch.arange(4.0, device="cuda")
    t.sum().item()
    float(t[0])
    t.tolist()
    bool((t > 0).any())
    t.nonzero()
    t[t > 1]
    t[t > 1] = torch.ones(2, device="cuda")
    t.cpu()
    torch.tensor([1.0]).to("cuda")
    torch.cuda.synchronize()
    torch.cuda.current_stream().synchronize()


def no_waits(rank: int) -> Any:
    t = torch.arange(4.0, device="cuda")
    torch.ones(2).to("cuda", non_blocking=True)
    t[t > 2] = 0.0
    t[torch.arange(2, device="cuda")] += 1
    torch.where(t > 1, t, t * 2).softmax(0).sum()
    dist.all_reduce(t)


PROBES = {f.__name__: f for f in (mixed, host_collective, strided, beyond, summed, waits, no_waits)}
