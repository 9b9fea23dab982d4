"""Which attributes of modules a step reads before it writes them: those carry something from the step before.

What a step writes first, such as the attention map of its own batch, is made anew by every step. A descriptor on the module's class
sees reads and writes of one attribute; the values stay in the module.
"""

from typing import Any

ENOUGH = 3
"""Whole steps after which an attribute that none of them read first counts as made anew."""
_ABSENT = object()


class _Seen:
    """The descriptor of one attribute of one class."""

    def __init__(self, name: str, default: object, own: bool, watch: "AttributeWatch"):
        self.name, self.default, self.own, self.watch = name, default, own, watch

    def __get__(self, owner: object, kind: type | None = None) -> Any:
        if owner is None:
            if self.default is _ABSENT:
                raise AttributeError(self.name)
            return self.default
        self.watch.note_read(owner, self.name)
        try:
            return vars(owner)[self.name]
        except KeyError:
            if self.default is _ABSENT:
                raise AttributeError(f"{type(owner).__name__!r} object has no attribute {self.name!r}") from None
            return self.default

    def __set__(self, owner: object, value: object) -> None:
        self.watch.note_written(owner, self.name)
        vars(owner)[self.name] = value

    def __delete__(self, owner: object) -> None:
        self.watch.note_written(owner, self.name)
        try:
            del vars(owner)[self.name]
        except KeyError:
            raise AttributeError(self.name) from None


class AttributeWatch:
    """Notes what each step reads first. Values are those of the owners throughout."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, str], int] = {}
        """Steps that began since an attribute is watched."""
        self._read: set[tuple[int, str]] = set()
        self._written: set[tuple[int, str]] = set()
        self._descriptors: dict[tuple[type, str], _Seen] = {}

    def add(self, owner: object, name: str) -> None:
        """Watch an attribute of an object from the next step on."""
        kind, key = type(owner), (id(owner), name)
        if key in self._steps:
            return
        self._steps[key] = 0
        if (kind, name) in self._descriptors:
            return
        default = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _ABSENT)
        if hasattr(type(default), "__get__"):  # a property or a method: it is not this object's own value
            self._read.add(key)
            return
        self._descriptors[kind, name] = made = _Seen(name, default, name in vars(kind), self)
        setattr(kind, name, made)

    def begin_step(self) -> None:
        """A step begins: nothing is written yet."""
        self._written.clear()
        for key in self._steps:
            self._steps[key] += 1

    def note_read(self, owner: object, name: str) -> None:
        key = (id(owner), name)
        if key not in self._written:
            self._read.add(key)

    def note_written(self, owner: object, name: str) -> None:
        self._written.add((id(owner), name))

    def is_read(self, owner: object, name: str) -> bool:
        """Whether a step was seen to read it before it wrote it. An attribute that is not watched counts as read."""
        key = (id(owner), name)
        return key in self._read or key not in self._steps

    def forget_writes(self) -> None:
        """What follows is no part of the step that wrote."""
        self._written.clear()

    def is_made_anew(self, owner: object, name: str) -> bool:
        """Whether enough whole steps were seen, and each wrote the attribute before it read it."""
        key = (id(owner), name)
        return key not in self._read and self._steps.get(key, 0) > ENOUGH

    def close(self) -> None:
        """Take the descriptors off the classes."""
        for (kind, name), made in self._descriptors.items():
            if vars(kind).get(name) is made:
                delattr(kind, name)
                if made.own:
                    setattr(kind, name, made.default)
        self._descriptors.clear()
