"""The second tolerance of verify: a step in the plan's own number formats, against one device in the same formats.

Float64 proofs detect none of these faults: each affects fp32 and 16-bit values only, and is patched into torch.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jobs
import jobs_context
import jobs_mixed
import jobs_pipeline
import jobs_real
import jobs_unlike
import pytest
import torch
import torch.distributed as dist
from rarely import sampled
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from plait.config.job import Job
from plait.config.plan import Plan
from plait.proof.verify import verify

pytestmark = pytest.mark.whole

SHORT = torch.bfloat16


def adamw(job: Job) -> Job:
    return replace(job, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))


JOBS: dict[str, Callable[[], Job]] = {
    "groups": lambda: adamw(jobs.groups()),
    "deep": lambda: adamw(jobs_pipeline.LISTED["deep"]()),
    "dropout": lambda: adamw(jobs.mlp()),
    "ragged": lambda: adamw(jobs.ragged()),
    "context": lambda: adamw(jobs_context.OWN["plain"]()),
    "norm": lambda: adamw(jobs.batch_norm()),
    "chain": lambda: adamw(jobs.make(jobs_unlike.Chain)),
    "gpt": lambda: adamw(jobs_real.ALL["gpt"]()),
    "packed": lambda: adamw(jobs_context.HUGGING["packed"]()),
    "adapters": jobs_mixed.adapters,
    "keys": lambda: adamw(jobs_mixed.keys()),
}
TIED = ("gpt", "packed")


def rounded(t: Any) -> None:
    if isinstance(t, Tensor) and t.dtype == torch.float32 and t.numel() > 8:
        with torch.no_grad():
            t.copy_(t.to(SHORT))


def sums_rounded(patch: pytest.MonkeyPatch) -> None:
    """Tensors are rounded to bf16 before they are summed in fp32."""
    real = dist.all_reduce
    patch.setattr(dist, "all_reduce", lambda t, *a, **k: (rounded(t), real(t, *a, **k))[1])


def results_rounded(patch: pytest.MonkeyPatch) -> None:
    """A sum over ranks is rounded to bf16 precision, in fp32."""
    real = dist.all_reduce

    class Rounding:
        def __init__(self, work: Any, t: Tensor):
            self.work, self.t = work, t

        def wait(self) -> None:
            self.work.wait()
            rounded(self.t)

    def all_reduce(t: Tensor, *a: Any, **k: Any) -> Any:
        work = real(t, *a, **k)
        return Rounding(work, t) if work is not None else rounded(t)

    patch.setattr(dist, "all_reduce", all_reduce)


def sums_in_16(patch: pytest.MonkeyPatch) -> None:
    """Sums are computed in bf16, to save half of the bytes."""
    real = dist.all_reduce

    class Done:
        def wait(self) -> None: ...

    def all_reduce(t: Tensor, *a: Any, **k: Any) -> Any:
        if t.dtype != torch.float32 or t.numel() <= 8:
            return real(t, *a, **k)
        half, k = t.to(SHORT), k | {"async_op": False}
        real(half, *a, **k)
        t.copy_(half)
        return Done()

    patch.setattr(dist, "all_reduce", all_reduce)


def messages_rounded(patch: pytest.MonkeyPatch) -> None:
    """Messages between ranks are rounded to bf16."""
    for name in ("isend", "send"):
        real = getattr(dist, name)
        patch.setattr(dist, name, lambda t, *a, real=real, **k: real(_round(t), *a, **k))


def steps_rounded(patch: pytest.MonkeyPatch) -> None:
    """Messages of a ring are rounded to bf16."""
    real = dist.batch_isend_irecv

    def batch(ops: list[Any]) -> Any:
        for op in ops:
            op.tensor = _round(op.tensor) if op.op is dist.isend else op.tensor
        return real(ops)

    patch.setattr(dist, "batch_isend_irecv", batch)


def _round(t: Tensor) -> Tensor:
    return t.to(SHORT).to(t.dtype) if t.dtype == torch.float32 and t.numel() > 8 else t


def state_in_16(patch: pytest.MonkeyPatch) -> None:
    """The optimizer keeps its state in bf16."""

    def keep(self: Any, state: Any) -> None:
        for key in ("exp_avg", "exp_avg_sq"):
            if state[key].dtype == torch.float32:
                state[key] = state[key].to(SHORT)

    _after_step(patch, keep)


def state_rounded(patch: pytest.MonkeyPatch) -> None:
    """The state is fp32, rounded to bf16 precision."""
    _after_step(patch, lambda self, state: [rounded(state[key]) for key in ("exp_avg", "exp_avg_sq")])


def _after_step(patch: pytest.MonkeyPatch, act: Callable[[Any, Any], Any]) -> None:
    real = torch.optim.AdamW.step

    def step(self: Any, closure: Any = None) -> Any:
        result = real(self, closure)
        if c10d.is_initialized():
            for state in self.state.values():
                act(self, state)
        return result

    patch.setattr(torch.optim.AdamW, "step", step)


def masters_rounded(patch: pytest.MonkeyPatch) -> None:
    """The weights lose their fp32 digits after each step."""
    real = torch.optim.AdamW.step

    def step(self: Any, closure: Any = None) -> Any:
        result = real(self, closure)
        for group in self.param_groups if c10d.is_initialized() else ():
            for parameter in group["params"]:
                rounded(parameter)
        return result

    patch.setattr(torch.optim.AdamW, "step", step)


def reduced_in_16(patch: pytest.MonkeyPatch) -> None:
    """FSDP2 sums gradients in bf16."""
    from plait.parallel.fsdp import strategy as fsdp

    real = fsdp.MixedPrecisionPolicy
    patch.setattr(fsdp, "MixedPrecisionPolicy", lambda p, r, **k: real(p, SHORT if p else r, **k))


def gathered_in_32(patch: pytest.MonkeyPatch) -> None:
    """FSDP2 gathers twice as many bytes as the plan specifies."""
    from plait.parallel.fsdp import strategy as fsdp

    real = fsdp.MixedPrecisionPolicy
    patch.setattr(fsdp, "MixedPrecisionPolicy", lambda p, r, **k: real(None, r, **k))


def added_in_16(patch: pytest.MonkeyPatch) -> None:
    """Micro-batches are added up in bf16."""
    real = torch.Tensor.backward

    def backward(self: Tensor, *a: Any, **k: Any) -> None:
        real(self, *a, **k)
        if c10d.is_initialized():
            import gc

            for parameter in [p for p in gc.get_objects() if isinstance(p, torch.nn.Parameter) and p.grad is not None]:
                rounded(parameter.grad)

    patch.setattr(torch.Tensor, "backward", backward)


def not_autocast(patch: pytest.MonkeyPatch) -> None:
    """A rank computes in fp32 where the plan specifies bf16."""
    real = torch.autocast.__enter__

    def enter(self: Any) -> Any:
        self._enabled = self._enabled and not (c10d.is_initialized() and c10d.get_rank() == 1)
        return real(self)

    patch.setattr(torch.autocast, "__enter__", enter)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "fp32 sums rounded, dp": (sums_rounded, "groups", "dp=2"),
    "fp32 sums rounded, tp": (sums_rounded, "deep", "tp=2 sequence_parallel=false"),
    "fp32 messages rounded, pp": (messages_rounded, "deep", "pp=2 microbatches=2"),
    "fp32 messages rounded, fsdp": (messages_rounded, "deep", "fsdp=2"),
    "fp32 messages rounded, cp": (steps_rounded, "context", "cp=2"),
    "fp32 state in 16": (state_in_16, "groups", "dp=2"),
    "sums rounded": (sums_rounded, "deep", "dp=2 microbatches=2 precision=bf16"),
    "results rounded": (results_rounded, "deep", "dp=2 precision=bf16"),
    "sums in 16": (sums_in_16, "groups", "dp=2 precision=bf16"),
    "state in 16": (state_in_16, "deep", "dp=2 precision=bf16"),
    "state rounded": (state_rounded, "deep", "dp=2 precision=bf16"),
    "state rounded, tp": (state_rounded, "deep", "tp=2 precision=bf16"),
    "masters rounded": (masters_rounded, "deep", "dp=2 precision=bf16"),
    "masters rounded, tp": (masters_rounded, "deep", "tp=2 precision=bf16"),
    "reduced in 16": (reduced_in_16, "deep", "fsdp=2 precision=bf16"),
    "gathered in 32": (gathered_in_32, "deep", "fsdp=2 precision=bf16"),
    "added in 16": (added_in_16, "deep", "dp=2 microbatches=3 precision=bf16"),
    "not autocast": (not_autocast, "deep", "dp=2 precision=bf16"),
    "fp32 sums rounded, adapters of bf16": (sums_rounded, "adapters", "dp=2"),
    "fp32 state rounded, adapters of bf16": (state_rounded, "adapters", "dp=2"),
    "fp32 sums rounded, keys": (sums_rounded, "keys", "tp=2"),
    "fp16 sums rounded": (sums_rounded, "groups", "dp=2 precision=fp16"),
}
LIGHT = (
    "fp32 sums rounded, dp",
    "fp32 messages rounded, pp",
    "state rounded, tp",
)


@pytest.mark.parametrize(
    "name", sampled(3, [pytest.param(n, marks=() if n in LIGHT else pytest.mark.prove) for n in FAULTS])
)
def test_faults_that_float64_does_not_see(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    act, job, plan = FAULTS[name]
    act(monkeypatch)
    verdict = verify(JOBS[job](), Plan.parse(plan))
    wrong = {p.code for p in verdict.probes if not p.equal}
    assert wrong and wrong <= {"F", "F2", "F3"}, (wrong, verdict.to_dict())
    assert verdict.code in ("V023", "V024", "V025")


PLANS = (
    "dp=2",
    "dp=3 microbatches=2",
    "fsdp=2",
    "fsdp=2 zero_stage=1 activation_checkpointing=full",
    "pp=2 microbatches=2",
    "pp=2 fsdp=2 microbatches=2",
    "tp=2",
    "tp=2 fsdp=2",
    "dp=2 offload=optimizer",
    "offload=all",
    "pp=2 microbatches=2 offload=all",
)
CLEAN = [
    (name, f"{plan} precision={precision}")
    for name in JOBS
    if name not in (*TIED, "adapters", "keys")
    for plan in PLANS
    for precision in ("fp32", "bf16", "fp16")
    if not (name == "norm" and "microbatches" in plan)
    and not (("pp" in plan or "tp" in plan) and name in ("groups", "dropout", "norm", "chain"))
    and not (name == "ragged" and ("pp" in plan or "tp" in plan))
] + [("context", f"cp=2 {more}precision={p}") for more in ("", "cp_method=ulysses ") for p in ("fp32", "bf16", "fp16")]
CLEAN += [
    (name, f"{plan} precision=bf16")
    for name in TIED
    for plan in ("pp=2 fsdp=2 microbatches=2", "cp=2 fsdp=2", "dp=2 cp=2 microbatches=2", "pp=2 microbatches=3")
]
SOME = (
    ("deep", "dp=2 precision=bf16"),
    ("deep", "offload=all precision=bf16"),
    ("deep", "pp=2 microbatches=2 offload=all precision=bf16"),
    ("deep", "tp=2 precision=bf16"),
    ("dropout", "dp=2 precision=fp16"),
    ("norm", "dp=2 precision=bf16"),
)


@pytest.mark.parametrize(
    "name, plan", sampled(4, [pytest.param(n, p, marks=() if (n, p) in SOME else pytest.mark.prove) for n, p in CLEAN])
)
def test_right_runs_are_not_accused(name: str, plan: str) -> None:
    verdict = verify(JOBS[name](), Plan.parse(plan))
    assert verdict.equal, verdict.to_dict()
    untried = any(
        "was not tried: one device fails" in line for line in verdict.forced["then"]
    )  # torch has no such kernel
    assert any(p.code == "F" and p.name for p in verdict.probes) or untried, verdict.forced


class Wide(torch.nn.Sequential):
    """Layers so large that torch's CPU kernel sums full and sharded ones with different rounding."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(6, 512), torch.nn.ReLU(), torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1))


@pytest.mark.parametrize("plan", sampled(2, ("tp=2", "fsdp=2", "fsdp=2 offload=all", "pp=2 fsdp=2 microbatches=2", "tp=2 fsdp=2")))
def test_gradients_of_long_tensors_are_clipped_alike(plan: str) -> None:
    verdict = verify(replace(adamw(jobs.make(Wide)), clip=1e-3), Plan.parse(plan))
    assert verdict.equal, verdict.to_dict()
    assert any(p.code == "F" and p.name for p in verdict.probes), verdict.forced


MIXED = (
    ("in_bf16", "dp=2"), ("in_bf16", "fsdp=2 microbatches=2"), ("in_bf16", "pp=2 microbatches=2"), ("in_bf16", "tp=2"),
    ("layered_in_bf16", "dp=3"), ("layered_in_bf16", "fsdp=2"), ("keys_in_bf16", "tp=2"), ("keys_in_bf16", "dp=2 microbatches=2"),
    ("keys", "tp=2"), ("keys", "tp=2 precision=bf16"), ("keys", "pp=2 microbatches=2"), ("adapters", "fsdp=2"), ("adapters", "pp=2"),
    ("adapters", "dp=2 microbatches=2"), ("doubled", "dp=2"), ("doubled", "pp=2 microbatches=2"), ("concatenated", "pp=2 microbatches=4"),
    ("concatenated", "pp=2 microbatches=4 precision=bf16"), ("scalars", "dp=3 microbatches=2"), ("scalars", "dp=2 precision=bf16"),
)  # fmt: skip


@pytest.mark.parametrize("name, plan", sampled(len(MIXED), MIXED))
def test_formats_of_the_models_own_and_gradients_of_rounding_alone(name: str, plan: str) -> None:
    verdict = verify(jobs_mixed.ALL[name](), Plan.parse(plan))
    assert verdict.equal, verdict.to_dict()
    assert any(p.code == "F" and p.name for p in verdict.probes), verdict.forced
