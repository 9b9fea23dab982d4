"""Which parameters a run trains, and that it stays so.

`Job.optimizer` is given the parameters that require gradients when the model is made; strategies sum the gradients of these. A parameter
that is thawed later would be left out of all that, or would drift apart on ranks. Freezing is no more than a gradient that does not come.
"""

from collections.abc import Iterator

from torch import Tensor

from plait.config.errors import FAILED, PlaitError, Problem
from plait.parallel.rank_model import RankModel
from plait.tensors.parameters import ParameterHooks
from plait.tensors.torch_private import gradient_hooks, sharded_here


class TrainedParameters:
    """Watches the parameters that the model's code and callbacks see on this rank."""

    def __init__(self, rank_model: RankModel):
        self.rank_model, self.live = rank_model, dict(rank_model.module.named_parameters())
        self.trained = {name for name, p in self.live.items() if p.requires_grad}
        self.names = {id(p): name for name, p in self.live.items()}
        self.hooks = set[tuple[str, int]]()
        self.alone = rank_model.plan.devices == 1 and rank_model.plan.microbatches == 1

    def begin(self) -> None:
        """Before the passes of a step: hooks that are there now were put by whoever owns the loop, and are left alone."""
        self.hooks = set(self._hooks())

    def check(self, step: int) -> None:
        """After the passes of a step, counted from 1, or a callback: P094 for a parameter that was thawed, P093 for a new hook."""
        for name, parameter in self._seen():
            if parameter.requires_grad and name not in self.trained:
                raise self._thawed(name, step)
        new = [] if self.alone else [hook for hook in self._hooks() if hook not in self.hooks]
        if new:
            raise self._hooked(new[0][0], step)

    def _hooks(self) -> Iterator[tuple[str, int]]:
        """(name of a parameter, number of a hook of the user's own code on its gradient)."""
        for name, parameter in self._seen():
            if any(gradient_hooks(parameter)):
                found = ParameterHooks.of_job(parameter)
                yield from ((name, number) for number in (*found.before, *found.after))

    def _seen(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.live.items()
        for module in self.rank_model.techniques.shards.modules if self.rank_model.techniques.shards is not None else ():
            for part, whole in sharded_here(module):
                if whole is None:
                    continue
                yield self.names[id(part)], whole
                if part.requires_grad and not whole.requires_grad and self.rank_model.job.phases is None:
                    part.requires_grad_(False)  # FSDP2 gives the whole what the part has, when it gathers again

    def _thawed(self, name: str, step: int) -> PlaitError:
        what = f"{name} was frozen when training began, and requires gradients in step {step}"
        why = "Job.optimizer was given the parameters that require gradients when the model is made, and so it never updates this one"
        fix = (
            "let it require gradients from the start, and detach what it gives until then: x = self.backbone(x).detach()",
            "train in two runs: plait.Job(weights=…) of the second starts from the weights of the first",
        )
        return PlaitError(Problem("P094", what, why=why, fix=fix), FAILED)

    def _hooked(self, name: str, step: int) -> PlaitError:
        what = f"a hook was put on the gradient of {name} while training, in step {step} or before"
        why = "autograd calls it with the gradient of a part of the batch; hooks that are there when the model is made get all of it"
        fix = ("register the hook in the model's constructor, and decide inside of it from which step on it acts",)
        return PlaitError(Problem("P093", what, why=why, fix=fix), FAILED)
