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


def pinned(rank: int) -> Any:
    a, b = torch.arange(4.0).pin_memory(), torch.arange(4.0)
    into = torch.empty(4, pin_memory=True)
    into.copy_(a[1:3].to("cuda", non_blocking=True).repeat(2), non_blocking=True)
    b.to("cuda", non_blocking=True)
    return [a.is_pinned(), a[2:].is_pinned(), b.is_pinned(), into.tolist()]


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


def aside(rank: int) -> tuple[Any, Tensor]:
    """A stream, and what is being computed there."""
    t, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        t.mul_(2)
    return side, t


def waited_for(rank: int) -> Any:
    """In all ways there are."""
    side, a = aside(rank)
    torch.cuda.current_stream().wait_stream(side)
    side, b = aside(rank)
    side.record_event().wait()
    side, c = aside(rank)
    side.synchronize()
    other, d = aside(rank)
    event = torch.cuda.Event()
    event.record(other)
    event.synchronize()
    total = a + b + c + d
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    return (total / 2).tolist()


def unwaited_stream(rank: int) -> Any:
    return (aside(rank)[1] + 1).sum()


def unwaited_write(rank: int) -> Any:
    """A stream reads what this one then overwrites."""
    t, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        t.sum()
    t.zero_()


def event_before_its_time(rank: int) -> Any:
    side, t = aside(rank)
    event = side.record_event()
    with torch.cuda.stream(side):
        t.add_(1)
    event.wait()
    return t.sum()


def unwaited_collective(rank: int) -> Any:
    t = torch.ones(4, device="cuda")
    work = dist.all_reduce(t, async_op=True)
    t + 1
    work.wait()


def collective_of_what_is_not_there(rank: int) -> Any:
    dist.all_reduce(aside(rank)[1])


def waited_on_another_stream(rank: int) -> Any:
    t, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    work = dist.all_reduce(t, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
    return t + 1


def other_parts(rank: int) -> Any:
    """Two streams in two halves of one memory."""
    t, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        t[:4].mul_(2)
    return t[4:].mul_(3).tolist()


RACES = (
    unwaited_stream, unwaited_write, event_before_its_time, unwaited_collective, collective_of_what_is_not_there,
    waited_on_another_stream,
)  # fmt: skip
OTHERS = (pinned, mixed, host_collective, strided, beyond, summed, waits, no_waits, waited_for, other_parts)
PROBES = {f.__name__: f for f in (*OTHERS, *RACES)}
