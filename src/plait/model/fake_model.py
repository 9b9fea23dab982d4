"""Sketch a job's model without memory for its weights. A model of any size is built on fake tensors, which have shapes only.

A constructor may read values that it has just computed, such as rates of stochastic depth. Then small tensors are real, and only large ones
are fake. A small model whose forward pass reads values is built with real weights.
"""

from contextlib import nullcontext

from torch import nn

from plait.config.errors import PlaitError, Problem, summarize_error
from plait.config.job import Job, find_user_line
from plait.data import batch as data
from plait.data import sampling
from plait.model.build_model import make_loss, make_model, run_model
from plait.model.sketch import Sketch, sketch_model
from plait.randomness.keyed import preserve_host_state
from plait.tensors.fake import PartlyFakeMode
from plait.tensors.torch_private import FakeTensorMode

MOST_REAL_BYTES = 2 << 30
"""Maximum bytes of weights of a model that is built with real tensors, if fake ones fail."""


def sketch_of(job: Job) -> Sketch:
    """Sketch a job's model without memory for its weights. Raises J015 and J018 as `sketch_fake_model`."""
    return sketch_fake_model(job)[1]


@preserve_host_state()
def sketch_fake_model(job: Job) -> tuple[nn.Module, Sketch]:
    """Build a job's model, with fake tensors if possible, and sketch it.

    Raises J015 if `Job.units` does not match the model, and J018 if a large model needs real weights.
    """
    example = sampling.open_sketch_data(job, sampling.open_job_data(job))
    pairs = lambda n: data.make_sketch_batch(example, n)  # noqa: E731
    judge = lambda n: make_loss(job, pairs(n)[1])  # noqa: E731
    failure: Exception = RuntimeError()
    weights = 0
    fakes = FakeTensorMode(allow_non_fake_inputs=True), FakeTensorMode(allow_non_fake_inputs=True)
    for mode in (fakes[0], PartlyFakeMode(fakes[1]), nullcontext()):
        if isinstance(mode, nullcontext) and weights > MOST_REAL_BYTES:
            break
        try:
            with mode:
                model = make_model(job)
            weights = sum(p.numel() * p.element_size() for p in model.parameters())
            return model, sketch_model(model, lambda n: pairs(n)[0], run_model, job.units, judge)
        except PlaitError:
            raise
        except Exception as error:
            failure = error
    raised, where = summarize_error(failure), find_user_line(failure)
    if weights <= MOST_REAL_BYTES:
        raise PlaitError(Problem("J003", f"the job's model raised {raised}", where=where)) from failure
    why = f"on fake tensors it raised {raised}; its weights are {weights / 2**30:.0f} GiB"
    fix = ("make the model smaller, for example with fewer layers",)
    problem = Problem("J018", "this model cannot be analyzed without real weights", why, where, fix)
    raise PlaitError(problem) from failure
