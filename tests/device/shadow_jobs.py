"""Jobs and probes for simulated devices: operations that a device rejects, and operations that must be waited for."""

from dataclasses import replace
from typing import Any
from unittest import mock

import jobs
import jobs_context
import jobs_moe
import jobs_padded
import jobs_pipeline
import torch
import torch.distributed as dist
from torch import Tensor

import plait
from device import ring_probes, shadow
from plait.data.loading import DevicePrefetcher
from plait.engine.build import pick_device
from plait.engine.engine import Engine
from plait.launch import devices
from plait.launch.place import Place
from plait.tensors.transfers import HostCopy


def reading() -> plait.Job:
    """A loss that reads a value in each step."""
    job = jobs.mlp()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        scale = 1.0 if float(out.detach().mean()) > 1e9 else 2.0
        return scale * torch.nn.functional.mse_loss(out, y)

    return replace(job, loss=loss)


def evaluated() -> plait.Job:
    evaluate = plait.Evaluate(lambda: jobs.Numbers(7), lambda out, y: {"error": (out - y).abs()})
    return replace(jobs_pipeline.LISTED["deep"](), evaluate=evaluate)


def spread() -> plait.Job:
    """A model with its layers on two devices."""
    job = jobs.mlp()

    def model() -> torch.nn.Module:
        made = job.model()
        first, *_, last = made.children()
        first.to("cuda:0"), last.to("cuda:1")
        return made

    return replace(job, model=model)


def fused(job: plait.Job) -> plait.Job:
    """With an optimizer whose updates can be queued before their values are read, and clipping."""
    return replace(job, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True), clip=0.1)


class Spoiled(jobs.Numbers):
    """Two samples are NaN."""

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(i)
        return (x * torch.nan if i in (11, 12) else x), y


def spoiled() -> plait.Job:
    """With batch normalization, which a skipped step must not change."""
    return fused(replace(jobs.batch_norm(), data=lambda: Spoiled(), steps=12))


def bursting() -> plait.Job:
    """An evaluation after each step, including those with non-finite values."""
    evaluate = plait.Evaluate(lambda: jobs.Numbers(7), lambda out, y: {"error": (out - y).abs()}, every=1)
    return fused(replace(jobs.batch_norm(), data=lambda: Spoiled(), steps=12, evaluate=evaluate))


def loud_norm() -> plait.Job:
    """Its scaled gradients overflow 16 bits in its first steps. Such a step still updates its running statistics."""
    job = jobs.batch_norm()
    return fused(replace(job, loss=lambda out, y: 30 * torch.nn.functional.mse_loss(out, y), steps=12))


def logging() -> plait.Job:
    """A loss that logs a value."""
    job = jobs.mlp()

    def loss(out: Tensor, y: Tensor) -> Tensor:
        plait.log("size", out.detach().square().mean())
        return torch.nn.functional.mse_loss(out, y)

    return fused(replace(job, loss=loss, steps=6))


def averaged(job: plait.Job) -> plait.Job:
    """With a moving average of the weights, and an optimizer whose updates can be queued before their values are read."""
    return replace(fused(job), ema=plait.EMA(0.5))


def loud() -> plait.Job:
    """Its scaled gradients overflow 16 bits in its first steps."""
    job = jobs.mlp()
    return fused(replace(job, loss=lambda out, y: 30 * torch.nn.functional.mse_loss(out, y), steps=12))


def padded() -> plait.Job:
    """A `collate` that pads, for training and for evaluation."""
    job = jobs_padded.tagger()
    evaluate = plait.Evaluate(lambda: jobs_padded.Sentences(9), lambda out, y: {"size": out.abs().mean(-1)})
    return replace(job, evaluate=evaluate)


class Sided(torch.nn.Module):
    """Returns two tensors; a module that uses the second sends no gradient back to it."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)

    def forward(self, x: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:
        return x + (self.main(x) + side.detach()).tanh(), self.side(x)


class Ungiven(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = torch.nn.ModuleList(Sided() for _ in range(4)), torch.nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        side = x
        for block in self.blocks:
            x, side = block(x, side)
        return self.head(x)


class Hoarding(torch.nn.Module):
    """Keeps a MiB of each forward pass, which a dry run does not include."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner, self.kept = inner, list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            self.kept.append(torch.zeros(1 << 20, dtype=torch.uint8, device=x.device))
        return self.inner(x)


def hoarding() -> plait.Job:
    job = jobs.mlp()
    return replace(job, model=lambda: Hoarding(job.model()))


def large() -> plait.Job:
    """Parameters of 1 MiB, and two values of Adam for each."""
    job = jobs.mlp()
    nn = torch.nn
    layers = lambda: nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 500), nn.Tanh(), nn.Linear(500, 1))  # noqa: E731
    return replace(job, model=layers, optimizer=lambda params: torch.optim.Adam(params, lr=1e-3))


class Looking(torch.nn.Module):
    """Reads tensor values: it cannot run on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = torch.nn.Linear(6, 8), torch.nn.Linear(8, 6), torch.nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).tanh())
        return self.head(x if float(x.detach().abs().sum()) > 0 else -x)


def many() -> plait.Job:
    """Sixteen layers of 16,512 values."""
    nn = torch.nn
    layers = lambda: nn.Sequential(nn.Linear(6, 128), *(m for _ in range(16) for m in (nn.Linear(128, 128), nn.Tanh())), nn.Linear(128, 1))  # noqa: E731
    return replace(jobs.mlp(), model=layers)


JOBS = {
    "many": many,
    "looking": lambda: jobs.make(Looking),
    "hoarding": hoarding,
    "large": large,
    "spread": spread,
    "loud": loud,
    "loud norm": loud_norm,
    "bursting": bursting,
    "logging": logging,
    "spoiled": spoiled,
    "mlp fused": lambda: fused(jobs.mlp()),
    "deep averaged": lambda: averaged(evaluated()),
    "spoiled averaged": lambda: averaged(spoiled()),
    "deep fused": lambda: fused(evaluated()),
    "words fused": lambda: fused(jobs_pipeline.LISTED["root_gpt"]()),
    "attention fused": lambda: fused(jobs_context.OWN["gpt"]()),
    "experts fused": lambda: fused(jobs_moe.gpt()),
    "ungiven": lambda: jobs.make(Ungiven, optimizer=lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.5)),
    "padded": padded,
    "stacked": lambda: jobs_moe.gpt(stacked=True),
    "streamed": lambda: jobs_padded.tagger(jobs_padded.Streamed),
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


def listed(rank: int) -> Any:
    """A rank whose device the driver lists, but CUDA does not."""
    with mock.patch.object(devices, "list_cuda_devices", lambda: ["pretended"] * 18):
        pick_device("cuda", Place(17, 18, 17))


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
    """One wait of each kind."""
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
    """A stream, and a tensor that is being computed on it."""
    t, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        t.mul_(2)
    return side, t


def waited_for(rank: int) -> Any:
    """All ways to wait correctly."""
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
    """A stream reads a tensor that this one then overwrites."""
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


def late(rank: int) -> Any:
    """A row on its way to the host, read too early and then in time."""
    row = HostCopy(torch.arange(3.0, device="cuda"))
    early = row.row.isnan().tolist()
    return [early, row.read()]


def given_up(rank: int) -> Any:
    """After each step, return whether all buffers are finite and the average is that of the weights, for a rank that saves its state
    because another rank failed."""
    engine = Engine(averaged(spoiled()), "dp=1", device="cuda", place=Place(0, 1), on_nan="skip")
    found, average = list[bool](), list[Tensor]()
    weights = [w.detach().clone() for w in engine.rank_model.params.values()]
    for batch in engine.batches():
        engine.step(batch)
        engine.undo_step()
        now = [w.detach().clone() for w in engine.rank_model.params.values()]
        if any(not torch.equal(a, b) for a, b in zip(now, weights)):
            average = [(a + w) / 2 for a, w in zip(average or now, now)]
        weights = now
        kept = engine.rank_model.techniques.average.tensors.values() if engine.rank_model.techniques.average is not None else ()
        finite = all(bool(b.isfinite().all()) for b in engine.model.buffers())
        found.append(finite and all(torch.allclose(a, b) for a, b in zip(kept, average, strict=True)))
    return found


def freed_too_early(rank: int) -> Any:
    """Memory of this stream is freed while another stream still reads it."""
    t, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        total = t.sum()
    del t
    torch.ones(4, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    return total.item()


def freed_in_time(rank: int) -> Any:
    """The same memory with `record_stream`, or after a wait."""
    t, side, here = torch.ones(4, device="cuda"), torch.cuda.Stream(), torch.cuda.current_stream()
    u = torch.ones(4, device="cuda")
    side.wait_stream(here)
    with torch.cuda.stream(side):
        total = t.sum() + u.sum()
    total.record_stream(here)
    t.record_stream(side)
    del t
    torch.ones(4, device="cuda")
    here.wait_stream(side)
    del u
    torch.ones(4, device="cuda")
    return total.item()


def copied_ahead(rank: int) -> Any:
    """Copies of host tensors as of the call, in any structure. Each may be taken once; later, a tensor is copied again."""
    copies, a, wide = DevicePrefetcher(torch.device("cuda", rank)), torch.arange(4.0), torch.ones(1).expand(3)
    pair = ({"a": a, "wide": wide}, a[:0])
    copies.start_copies([pair])
    a.add_(1)
    (first, empty), (again, _) = copies.take_tree(pair), copies.take_tree(pair)
    apart = first["a"].data_ptr() != again["a"].data_ptr()
    return [
        str(first["a"].device),
        [*map(list, (first["wide"].shape, empty.shape))],
        apart,
        first["a"].tolist(),
        again["a"].tolist(),
    ]


def samples_let_go(rank: int) -> Any:
    """A batch that is taken, used and dropped while the next is requested."""
    copies, a, b = DevicePrefetcher(torch.device("cuda", rank)), torch.arange(4.0), torch.ones(4)
    copies.start_copies([a])
    taken = copies.take_tree(a)
    found = taken * 2
    del taken
    copies.start_copies([b])
    return found.tolist()


def counted(rank: int) -> Any:
    """The allocator's statistics: with two tensors, after one is freed, after the peaks are reset, after its cache is emptied."""
    found = []

    def look() -> None:
        stats = torch.cuda.memory_stats()
        keys = ("requested_bytes.all.current", "allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current")
        found.append([stats[key] for key in keys])

    a, b = torch.empty(1000, device="cuda"), torch.empty(3 << 20, device="cuda", dtype=torch.uint8)
    look()
    half = b[: 1 << 20]  # a view
    del b
    look()
    del half
    look()
    torch.cuda.reset_peak_memory_stats()
    look()
    torch.cuda.empty_cache()
    look()
    free, total = torch.cuda.mem_get_info()
    return [found, total - free, a.numel()]


def full(rank: int) -> Any:
    """A device of 8 MiB, one of which another process uses."""
    shadow.LENT[0].blocks_size(torch.cuda.current_device(), 8 << 20, 1 << 20)
    kept = torch.empty(3 << 20, device="cuda", dtype=torch.uint8)
    torch.empty(3 << 20, device="cuda", dtype=torch.uint8)
    del kept
    torch.empty(5 << 20, device="cuda", dtype=torch.uint8)
    try:
        torch.ones(2 << 20, device="cuda")
    except torch.OutOfMemoryError as error:
        stats = torch.cuda.memory_stats()
        return [str(error), stats["num_alloc_retries"], stats["num_ooms"]]


RACES = (
    unwaited_stream, unwaited_write, event_before_its_time, unwaited_collective, collective_of_what_is_not_there,
    waited_on_another_stream, freed_too_early,
)  # fmt: skip
OTHERS = (
    given_up, late, counted, full, pinned, mixed, host_collective, strided, beyond, listed, summed, waits, no_waits, waited_for,
    other_parts, freed_in_time, copied_ahead, samples_let_go,
)  # fmt: skip
PROBES = {f.__name__: f for f in (*OTHERS, *RACES, *ring_probes.PROBES)}
