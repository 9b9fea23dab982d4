"""The job's metrics, tried on one and on two samples before training: a mistake in them must not cost a run its end.

The model's outputs are made up: it runs in eval mode on tensors without numbers, and random numbers get the shapes that
come out. So the trial costs next to nothing, whatever the plan. Where the model cannot run so, or the metrics raise on
such numbers, its real outputs decide, of a model that a rank has whole. Where neither is to be had, nothing is said.

It also shows metrics that give one value for a batch instead of one per sample: the mean of such values depends on how
many samples come at once, so on the plan.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.config.errors import PlaitError, Problem
from plait.config.job import user_line
from plait.data import batch as data
from plait.data.batch_rows import Pair
from plait.model.make import BuiltModel
from plait.model.sketch import Sketch
from plait.model.trace import fakes_of
from plait.parallel.precision import forward_format
from plait.parallel.rank_setup import RankSetup
from plait.randomness.keyed import host_kept, seed_host
from plait.tensors.fake import PartlyFake, emptied
from plait.tensors.modules import evaluating
from plait.tensors.torch_private import leaves, tree_flatten, tree_map_only, tree_unflatten

WHERE = "Evaluate(data=…)"
MOST = 256 << 20
"""Bytes of made-up outputs. Larger ones stay without numbers, and metrics may rightly fail on those."""
CERTAIN = (NameError, AttributeError, ImportError, TypeError)
"""What metrics raise by mistake, whatever numbers they are given; the last also where there are none."""
Metrics = Callable[[Any, Any], dict[str, Any]]


def metrics(setup: RankSetup, sketch: Sketch, made: BuiltModel) -> None:
    """Try the metrics of a rank's job, whose model is whole still. J024, J025, J007."""
    wanted = setup.job.evaluate
    if wanted is None:
        return
    try:
        with host_kept():
            seed_host(setup.job.seed, "evaluate", 0)
            held = data.example(wanted.data, data.opened(wanted.data, WHERE), WHERE)
            pairs = [setup.moved(data.first_samples(held, n)) for n in (1, 2)]
            with torch.no_grad(), forward_format(setup.plan, setup.cast, setup.at.type):
                counts = _Trial(setup, made, wanted.metrics, pairs, runs_hollow=not sketch.by_values).counts()
    except PlaitError as error:
        raise PlaitError([replace(p, where=p.where or WHERE) for p in error.problems], error.exit_code) from error
    means = [name for name, n in counts[0].items() if 0 < n == counts[1].get(name)] if counts else []
    if means:
        raise PlaitError(_one_for_all(means[0], counts[0][means[0]], wanted.metrics))


class _Trial:
    """The metrics of one and of two samples (inputs, targets), the second the first once more."""

    def __init__(self, setup: RankSetup, made: BuiltModel, metrics: Metrics, pairs: list[Pair], runs_hollow: bool):
        self.setup, self.made, self.metrics, self.pairs, self.runs_hollow = setup, made, metrics, pairs, runs_hollow
        self.fakes, self.hollow = fakes_of(made.fake), False

    def counts(self) -> list[dict[str, int]]:
        """How many values each metric has, of one and of two samples; nothing when it cannot be tried."""
        outputs = self._made_up() if self.runs_hollow else None
        failure: Exception | None = None
        if outputs is not None:
            try:
                with PartlyFake(self.fakes) if self.hollow else nullcontext():
                    return self._of(outputs)
            except PlaitError:
                raise
            except Exception as error:
                failure = error
        real = None if self.hollow else self._real()
        if real is not None:
            try:
                return self._of(real)
            except PlaitError:
                raise
            except Exception as error:
                raise _raised(error) from error
        if isinstance(failure, CERTAIN[:-1] if self.hollow else CERTAIN):
            raise _raised(failure) from failure
        return []

    def _of(self, outputs: list[Any]) -> list[dict[str, int]]:
        pairs = zip(outputs, self.pairs)
        return [{n: v.numel() for n, v in named(self.metrics(o, t), self.metrics).items()} for o, (_, t) in pairs]

    def _made_up(self) -> list[Any] | None:
        """Random numbers in the shapes that the model returns; None when it does not run on tensors without numbers."""
        fakes = self.fakes
        hide = lambda t: fakes.from_tensor(t) if t.is_floating_point() else t  # noqa: E731
        try:
            model = emptied(self.made.fake, fakes).eval()
            with PartlyFake(fakes), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                hollow = [self.setup.call(model, tree_map_only(Tensor, hide, inputs)) for inputs, _ in self.pairs]
            (one, form), (two, other) = map(_flat, hollow)
            self.hollow = sum(t.nbytes for t in two if isinstance(t, Tensor)) > MOST
            if self.hollow:
                return hollow
            first = [self._numbers(t) for t in one]
            second = [_twice(t, like) for t, like in zip(first, two, strict=True)]
        except Exception:
            return None
        return [tree_unflatten(first, form), tree_unflatten(second, other)]

    def _numbers(self, t: object) -> Any:
        if not isinstance(t, Tensor):
            return t
        made = torch.rand(t.shape) if t.is_floating_point() else torch.zeros(t.shape)
        return made.to(self.setup.at, t.dtype)

    def _real(self) -> list[Any] | None:
        """What the model returns, where this rank has all of it; None when it has not, or when the model raises."""
        model = self.made.model
        if self.made.fake is not model or any(t.is_meta for t in (*model.parameters(), *model.buffers())):
            return None
        try:
            with unchanged(model):
                return [self.setup.call(model, inputs) for inputs, _ in self.pairs]
        except Exception:
            return None


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """In eval mode; afterwards modes and buffers are what they were."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    try:
        with evaluating(model):
            yield
    finally:
        for buffer, value in buffers:
            buffer.copy_(value)


def _flat(outputs: object) -> tuple[list[Any], Any]:
    leaves(outputs)  # makes trees of dataclasses
    return tree_flatten(outputs)


def _twice(one: object, like: object) -> Any:
    """What is returned for two samples that are alike: that of one, twice along the dim that has grown."""
    if not isinstance(one, Tensor) or not isinstance(like, Tensor) or one.shape == like.shape:
        return one
    grown = [d for d, (a, b) in enumerate(zip(one.shape, like.shape)) if a != b]
    if one.dim() == like.dim() and len(grown) == 1 and like.shape[grown[0]] == 2 * one.shape[grown[0]]:
        return torch.cat([one, one], grown[0])
    raise NotImplementedError


def named(returned: object, metrics: Metrics) -> dict[str, Tensor]:
    """What metrics returned: a dict of values. J024 when it is something else."""
    fix = ('return {"error": (outputs - targets).abs()}    a dict, with one value per sample (or per token)',)
    if not isinstance(returned, dict):
        what = f"the job's metrics return {_told(returned)}, not a dict"
        raise PlaitError(Problem("J024", what, where=line_of(metrics), fix=fix))
    found = {}
    for name, values in returned.items():
        try:
            found[str(name)] = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError) as error:
            what = f"the job's metric {name!r} is {_told(values)}, not a tensor"
            raise PlaitError(Problem("J024", what, where=line_of(metrics), fix=fix)) from error
    return found


def _told(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _raised(error: Exception) -> PlaitError:
    what = f"the job's metrics raise {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    why = "they were tried on one sample before training: the first evaluation would have ended the run"
    return PlaitError(Problem("J024", what, why=why, where=user_line(error)))


def _one_for_all(name: str, count: int, metrics: Metrics) -> Problem:
    what = f"the job's metric {name!r} has as many values for two samples as for one: {count}"
    why = "it is a mean or a sum over the samples that come at once, and how many come depends on the plan"
    fix = ('one value per sample: leave out .mean(), .sum() or .item(); reduction="none" in torch\'s losses',)
    return Problem("J025", what, why=why, where=line_of(metrics), fix=fix)


def line_of(function: Callable[..., Any]) -> str:
    """file:line of a function of the user's own."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
