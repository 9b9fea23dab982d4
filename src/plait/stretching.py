"""The forward pass of a rank that computes a stretch of the sequence: who runs on what, unit by unit.

Code before the first attention runs on the whole sequence, so positions, masks and embeddings are what they are. From
there on a unit gets this rank's rows of whatever has a dim of the sequence, and what it returns is known to the code
around it as a `Stretch`. A unit that cannot run on a stretch gets the whole. What the loss gets is whole again.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from plait.attending import Answer, Attending
from plait.course import Call, Course
from plait.errors import FAILED, PlaitError, Problem
from plait.proving import show
from plait.stretch import Held, Stretch, for_loss
from plait.torchseam import is_unknown, named_leaves, tree_map, tree_unflatten


class Stretching:
    """The units of a model on one of `ranks` ranks."""

    hold: Callable[[int], Held]
    """Which rows it has of a sequence of some length."""
    answer: Answer
    """How its attentions see the other ranks' rows."""

    def __init__(self, model: nn.Module, course: Course, ranks: int):
        self.model, self.course, self.ranks = model, course, ranks
        self.unit = ""
        """That runs now."""
        self.held: Held | None = None
        self.turns: dict[str, int] = {}
        self.running = False
        self.calls: dict[str, list[Call]] = {}
        for call in course.calls:
            self.calls.setdefault(call.unit, []).append(call)

    def wrap(self) -> None:
        """Give units that run on stretches a forward whose attention sees the others. Before it is recomputed or so."""
        for name, calls in self.calls.items():
            if any(call.stretched for call in calls):
                module = self.model.get_submodule(name)
                show(module)
                module.forward = _Inside(self, name, module)

    def install(self) -> list[Any]:
        """From now on units get what they run on. After all other hooks: these must see plain tensors."""
        handles = [self.model.register_forward_pre_hook(self._begin, prepend=True)]
        handles.append(self.model.register_forward_hook(self._end, prepend=True, always_call=True))
        for name in self.calls:
            unit, module = _Border(self, name), self.model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(unit.enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(unit.leave))
        return handles

    def _begin(self, *_: Any) -> None:
        self.held, self.turns, self.running = None, {}, True

    def _end(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.running = False
        return output if self.held is None or output is None else for_loss(output, self.held)

    def call(self, unit: str) -> Call:
        """How the call of a unit that begins now runs. In a recomputation by the model's own code it is the first again."""
        calls = self.calls[unit]
        if not self.running:
            return calls[0]
        turn = self.turns.get(unit, 0)
        self.turns[unit] = turn + 1
        if turn >= len(calls):
            what = f"unit {unit} is called {turn + 1} times, in the sketch {len(calls)}"
            raise PlaitError(
                Problem("P043", what, why="the model's course depends on its input", fix=("cp=1",)), FAILED
            )
        return calls[turn]

    def rows(self, call: Call, leaves: list[tuple[str, Any]]) -> Held:
        """Which rows this rank holds: decided by the first unit on stretches, from what it is given."""
        if self.held is None:
            ranks, length = self.ranks, next(t.shape[call.given[path]] for path, t in leaves if path in call.given)
            if length < 2 * ranks:
                raise too_short(length, ranks)
            self.held = self.hold(length)
        return self.held


def too_short(length: int, ranks: int) -> PlaitError:
    """P042."""
    what = f"a sequence of {length} does not split over cp={ranks}"
    why = f"each rank holds two positions or more: {length} < 2 × {ranks}"
    return PlaitError(Problem("P042", what, why=why, fix=(f"cp={max(1, length // 2)}", "longer sequences")), FAILED)


class _Border:
    """What stands before and after a unit."""

    def __init__(self, stretching: Stretching, name: str):
        self.stretching, self.name = stretching, name
        self.now: Call | None = None

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = self.now = self.stretching.call(self.name)
        given = self._given(call, args, kwargs)
        self.stretching.unit = self.name
        return given

    def _given(self, call: Call, args: Any, kwargs: Any) -> Any:
        flat, spec = named_leaves((args, kwargs))
        if not call.stretched:
            if not any(isinstance(leaf, Stretch) for _, leaf in flat):
                return None
            return tree_map(lambda leaf: leaf.whole() if isinstance(leaf, Stretch) else leaf, (args, kwargs))
        held = self.stretching.rows(call, flat)
        return tree_unflatten([_mine(path, leaf, call, held) for path, leaf in flat], spec)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        call, self.now = self.now, None
        self.stretching.unit = ""
        if call is None or not call.stretched or not self.stretching.running:
            return output
        held = self.stretching.held
        assert held is not None
        flat, spec = named_leaves(output)
        return tree_unflatten(
            [
                Stretch.of(leaf, call.returned[path], held) if known(leaf) and path in call.returned else leaf
                for path, leaf in flat
            ],
            spec,
        )  # fmt: skip


def known(leaf: Any) -> bool:
    """A tensor with numbers: what another stage has is an unknown, of the whole sequence."""
    return isinstance(leaf, Tensor) and not is_unknown(leaf)


def _mine(path: str, leaf: Any, call: Call, held: Held) -> Any:
    """An argument as the unit gets it."""
    if not isinstance(leaf, Tensor):
        return leaf
    dim = None if path in call.left else call.given.get(path)
    if (
        path not in call.given and path not in call.left
    ):  # not there when the model was sketched: a mask that is made at need
        like = [d for d, n in enumerate(leaf.shape) if n == held.cut.length]
        dim = like[0] if len(like) == 1 and leaf.is_floating_point() else None
    if isinstance(leaf, Stretch):
        if dim is not None and dim - leaf.dim() == leaf.along and leaf.held is held:
            return leaf.local
        leaf = leaf.whole()
    return leaf if dim is None or leaf.shape[dim] != held.cut.length else held.take(leaf, dim)


class _Inside:
    """A unit's own forward, its attention seeing all stretches; also when it runs again in backward."""

    def __init__(self, stretching: Stretching, name: str, module: nn.Module):
        self.stretching, self.name, self.module = stretching, name, module
        self.replaced = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = self.stretching.held
        if held is None:
            return self.own(*args, **kwargs)
        with Attending(held, self.stretching.answer):
            return self.own(*args, **kwargs)

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """The unit's forward as it was."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)
