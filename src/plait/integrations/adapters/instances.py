"""A model that is there already, handed out fresh at every call: a job's model is made several times, in several processes."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from plait import PlaitError
from plait.config.errors import Problem, in_a_line
from plait.tensors.parameters import copy_module


def handed_out(model: nn.Module, code: str) -> Callable[[], nn.Module]:
    """Makes copies of the model, with the weights that it has now. No random number is drawn.

    The model is held, not copied before it is needed; one on a GPU is copied to host memory. Raises `PlaitError` with the
    adapter's code for what is no module, or cannot be copied.
    """
    if not isinstance(model, nn.Module):
        what = f"the model is a {type(model).__name__}, not a torch.nn.Module"
        raise PlaitError(Problem(code, what, fix=("give the model itself, as it is before training",)))
    if any(p.device.type not in ("cpu", "meta") for p in model.parameters()):
        model = copy_module(model).cpu()

    def fresh() -> nn.Module:
        try:
            return copy_module(model, {id(t): t.detach().clone() for t in _plain_tensors(model)})
        except (TypeError, RuntimeError, NotImplementedError) as error:
            what = f"the {type(model).__name__} cannot be copied: {in_a_line(error)}"
            why = "each process trains a copy of the model it was given"
            fix = ("dataclasses.replace(job, model=lambda: …)    a function that makes the model",)
            raise PlaitError(Problem(code, what, why=why, fix=fix)) from error

    return fresh


def _plain_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Its tensors that are no parameters. torch copies them storage by storage, which a model of fake tensors has not."""
    yield from model.buffers()
    for module in model.modules():
        yield from (t for t in vars(module).values() if type(t) is Tensor)
