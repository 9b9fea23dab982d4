"""What FSDP2's hooks on a unit would change for the model's code, and hooks beside them that keep it as it was."""

from typing import Any

from torch import Tensor, nn

from plait.tensors.torch_private import is_view, leaves, tree_flatten, tree_map_only, tree_unflatten


def without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """FSDP2's hook on an output that is a view is lost when the model's code changes it in place: give it a copy."""
    leaves(output)  # a dataclass that torch's trees have not met is one leaf to them
    return tree_map_only(Tensor, lambda t: t.clone() if t.requires_grad and is_view(t) else t, output)


def keep_one(module: nn.Module) -> None:
    """FSDP2's hook makes another tensor of each input. Code that asks whether two are one (`key is value`, as torch's own
    attention does) is given one again."""
    given: list[Any] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        given[:] = tree_flatten((args, kwargs))[0]

    def after(_: nn.Module, args: Any, kwargs: Any) -> Any:
        made, form = tree_flatten((args, kwargs))
        if len(made) != len(given):
            return None  # another hook gives the module something else
        first = {id(old): new for old, new in reversed(list(zip(given, made)))}
        one = [first[id(old)] if isinstance(old, Tensor) else new for old, new in zip(given, made)]
        given.clear()
        return tree_unflatten(one, form)

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_pre_hook(after, with_kwargs=True)
