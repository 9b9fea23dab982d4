"""The sketch of a job without its weights: a model of any size is built on fake tensors, which have shapes only.

A constructor may look at values that it has just made, such as the rates of a stochastic depth. Then small tensors
are made for real and only large ones are fake. A small model whose forward pass looks at values is built as it is.
"""

from contextlib import nullcontext

from torch import nn

from plait.config.errors import PlaitError, Problem, in_a_line
from plait.config.job import Job, user_line
from plait.data import batch as data
from plait.data import sampling
from plait.model.make import call, judged, make_model
from plait.model.sketch import Sketch, sketch
from plait.randomness.keyed import host_kept
from plait.tensors.fake import PartlyFake
from plait.tensors.torch_private import FakeTensorMode

HOLDS = 2 << 30
"""Bytes of weights up to which a model is built as it is when nothing else works."""


def sketch_of(job: Job) -> Sketch:
    """The sketch of a job's model, without memory for its weights. As `sketched`."""
    return sketched(job)[1]


@host_kept()
def sketched(job: Job) -> tuple[nn.Module, Sketch]:
    """A job's model, with fake tensors where it can be, and its sketch.

    J015 when `Job.units` does not fit the model, J018 when a large model can only be understood by building it.
    """
    example = sampling.example(job, sampling.data_of(job))
    pairs = lambda n: data.first_samples(example, n)  # noqa: E731
    judge = lambda n: judged(job, pairs(n)[1])  # noqa: E731
    failure: Exception = RuntimeError()
    weights = 0
    fakes = FakeTensorMode(allow_non_fake_inputs=True), FakeTensorMode(allow_non_fake_inputs=True)
    for mode in (fakes[0], PartlyFake(fakes[1]), nullcontext()):
        if isinstance(mode, nullcontext) and weights > HOLDS:
            break
        try:
            with mode:
                model = make_model(job)
            weights = sum(p.numel() * p.element_size() for p in model.parameters())
            return model, sketch(model, lambda n: pairs(n)[0], call, job.units, judge)
        except PlaitError:
            raise
        except Exception as error:
            failure = error
    raised, where = in_a_line(failure), user_line(failure)
    if weights <= HOLDS:
        raise PlaitError(Problem("J003", f"the job's model raised {raised}", where=where)) from failure
    why = f"on fake tensors it raised {raised}; its weights are {weights / 2**30:.0f} GiB"
    fix = ("make the model smaller, for example with fewer layers",)
    problem = Problem("J018", "this model cannot be sketched without building it", why, where, fix)
    raise PlaitError(problem) from failure
