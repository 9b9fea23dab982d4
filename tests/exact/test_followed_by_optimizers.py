"""Teachers that an optimizer's hooks average: rejected if a rank has shards of the weights, and unchanged by trials."""

from collections.abc import Callable
from typing import Any

import jobs
import pytest
import torch
from torch import Tensor, nn

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.proof import reference

STEPS = 3


def model() -> nn.Module:
    NET[:] = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 1))]
    return NET[0]


def lerped(parameters: list[Tensor]) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """A hook after the step averages the parameters of the optimizer."""
    teacher = TEACHER
    optimizer = torch.optim.Adam(parameters, lr=0.01)

    @torch.no_grad()
    def average(o: Any, *_: object) -> None:
        for t, p in zip(teacher, o.param_groups[0]["params"]):
            t.lerp_(p, 0.5)

    optimizer.register_step_post_hook(average)
    return optimizer, teacher


def listed(parameters: list[Tensor]) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """The same in calls for lists of tensors, by the class of the optimizer."""

    class Averaging(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            super().step()
            torch._foreach_mul_(TEACHER, 0.5)
            torch._foreach_add_(TEACHER, [p.detach() for p in self.param_groups[0]["params"]], alpha=0.5)

    return Averaging(parameters, lr=0.05), TEACHER


def normed(parameters: list[Tensor]) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """A table of the weights' norms."""
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def note(o: Any, *_: object) -> None:
        for i, p in enumerate(o.param_groups[0]["params"]):
            NORMS[i] = p.detach().norm()

    optimizer.register_step_pre_hook(note)
    return optimizer, [NORMS]


def module(parameters: list[Tensor]) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """The hook reads the model itself, which the job's model function stored in a list."""
    optimizer = torch.optim.SGD(parameters, lr=0.05)

    def average(*_: object) -> None:
        for t, p in zip(TEACHER, NET[0].parameters()):
            t.mul_(0.5).add_(p.data, alpha=0.5)

    optimizer.register_step_post_hook(average)
    return optimizer, TEACHER


def counted(parameters: list[Tensor]) -> tuple[torch.optim.Optimizer, list[Tensor]]:
    """Depends on no weight."""
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    optimizer.register_step_post_hook(lambda *_: STEP.add_(1.0) and None)
    return optimizer, [STEP]


KINDS: dict[str, Callable[[list[Tensor]], Any]] = {"lerped": lerped, "listed": listed, "normed": normed, "module": module}
NET = list[nn.Module]()
TEACHER, NORMS, STEP = list[Tensor](), torch.zeros(8), torch.zeros(1)


def fresh(kind: Callable[[list[Tensor]], Any]) -> plait.Job:
    torch.manual_seed(0)
    TEACHER[:] = [torch.randn_like(p) for p in model().parameters()]
    NORMS.zero_(), STEP.zero_()
    return jobs.make(model, optimizer=lambda p: kind(p)[0])


def plain(kind: Callable[[list[Tensor]], Any]) -> list[Tensor]:
    """The results of a plain loop outside of plait."""
    job = fresh(kind)
    torch.manual_seed(job.seed)
    net, data = job.model(), job.data()
    optimizer, outside = kind(list(net.parameters()))
    stream = reference.iterate_samples(job, data)
    for _ in range(STEPS):
        x, y = (torch.stack(rows) for rows in zip(*next(stream)[2]))
        job.loss(net(x), y).backward()
        optimizer.step()
        net.zero_grad()
    return [t.clone() for t in outside]


def trained(kind: Callable[[list[Tensor]], Any], text: str, folder: Any) -> list[Any]:
    job = fresh(kind)

    def rank(place: Any) -> dict[str, Any]:
        engine = Engine(job, text, place=place, device="cpu", directory=folder)
        for batch, _ in zip(engine.batches(), range(STEPS - 1)):
            engine.step(batch)
        engine.save(1)
        for batch, _ in zip(engine.batches(), range(1)):
            engine.step(batch)
        return {"outside": [t.tolist() for t in (NORMS, STEP, *TEACHER)]}

    return fork.run_ranks(rank, Plan.parse(text).world)[0]["outside"]


@pytest.mark.parametrize("kind", [*KINDS, "counted"])
def test_trials_leave_what_is_outside(kind: str, tmp_path: Any) -> None:
    make = {**KINDS, "counted": counted}[kind]
    expected, found = plain(make), trained(make, "dp=1", tmp_path)
    mine = found[2:] if kind in ("lerped", "listed", "module") else [found[0]] if kind == "normed" else [found[1]]
    for a, b in zip(expected, mine, strict=True):
        torch.testing.assert_close(torch.tensor(b), a, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("text", ("fsdp=2", "tp=2", "pp=2", "replica_groups=2 sync_every=2"))
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_weights_are_refused(kind: str, text: str, tmp_path: Any) -> None:
    with pytest.raises(PlaitError) as caught:
        trained(KINDS[kind], text, tmp_path)
    assert caught.value.problems[0].code == "P031", caught.value


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "text"), (("lerped", "dp=2"), ("listed", "dp=2 offload=optimizer"), ("counted", "fsdp=2")))
def test_others_are_not(kind: str, text: str, tmp_path: Any) -> None:
    make = {**KINDS, "counted": counted}[kind]
    expected, found = plain(make), trained(make, text, tmp_path)
    for a, b in zip(expected, found[2:] if kind != "counted" else [found[1]], strict=True):
        torch.testing.assert_close(torch.tensor(b), a, rtol=1e-5, atol=1e-6)
