"""What happens inside a rank, at a step and phase: a strike, put between the rank and its place (see `launch/place.py`).

A rank says at the beginning of each phase what it does; a strike listens to that and acts, once or as often as it is told.
Before it acts it leaves a mark in a folder: when, at which step, in which process. Training itself knows nothing of it.
"""

import ctypes
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.launch.place import Place

FILE = "a-fault-that-was-posed.py"
"""Where the code of acts seems to stand."""
BIT = 1 << 4
"""The bit of a byte that flips."""
EATEN = 1 << 30
"""Bytes that a rank asks for when it is to meet the limit of its control group."""


@dataclass(frozen=True)
class Strike:
    """`act` on `rank` when it begins `phase` and has done `step` steps, or more where it had nothing to do in that phase then."""

    act: str
    phase: str = "forward"
    step: int = -1
    rank: int = 1
    times: int = 1
    within: float = 0.0
    """How far into the phase, as a share of what the same phase took before. For what can be done to a process from a thread."""
    until: str = ""
    """A pattern of files, relative to the marks' folder: strike as soon as one exists."""
    after: str = ""
    """Only after the strike with this act has struck."""
    text: str = ""
    """What the act is told."""
    always: bool = False
    """Also in rounds with another number of ranks."""


@dataclass(frozen=True)
class Mark:
    """Left by a strike."""

    time: float
    step: int
    pid: int
    act: str


def marks(folder: Path) -> list[Mark]:
    """All that were left, in order, but those of slowing down."""
    found = [Mark(**json.loads(path.read_text())) for path in folder.glob("mark-*.json")]
    return sorted((mark for mark in found if mark.act != "slow"), key=lambda mark: mark.time)


def struck(strikes: tuple[Strike, ...], folder: Path, seed: int, world: int) -> Callable[[Place], Place]:
    """A function that puts those strikes around the place of a rank of `world` that are for it."""

    def around(place: Place) -> Place:
        there = lambda strike: strike.rank == place.rank and (strike.always or world == place.world)  # noqa: E731
        striker = Striker({n: strike for n, strike in enumerate(strikes) if there(strike)}, folder, seed)

        def beat(step: int, phase: str) -> None:
            place.beat(step, phase)
            striker.begins(step, phase)

        def reads() -> None:
            place.reads()
            striker.reads()

        return replace(place, beat=beat, reads=reads) if striker.strikes else place

    return around


class Striker:
    """The strikes of one process, by their numbers. Whoever begins a phase or reads a sample calls it, and it acts if one is due.

    `folder`: of the marks. A process that is started again finds there what it has suffered before. `plait chaos` puts one around
    a rank's place; a job that has no such place (under other launchers, in tests, in `bench/faults.py`) calls `begins` itself.
    """

    def __init__(self, strikes: Mapping[int, Strike], folder: Path, seed: int = 0):
        self.strikes, self.folder = strikes, folder
        self.draw, self.pid = random.Random(seed), os.getpid()
        self.took: dict[str, float] = {}
        self.phase, self.began, self.step = "start", time.monotonic(), -1

    def begins(self, step: int, phase: str) -> None:
        """A phase of a step begins."""
        now = time.monotonic()
        self.took[self.phase] = now - self.began
        self.phase, self.began, self.step = phase, now, step
        self._due(phase)

    def reads(self) -> None:
        """A sample is read, by the process itself or by a loader process that it has forked."""
        self._due("read" if os.getpid() == self.pid else "loader")

    def _due(self, phase: str) -> None:
        for number, strike in self.strikes.items():
            if strike.phase != phase or strike.step > self.step or self._done(number, strike):
                continue
            if strike.after and not any(mark.act == strike.after for mark in marks(self.folder)):
                continue
            if strike.until or strike.within:
                threading.Thread(target=self._later, args=(number, strike), daemon=True).start()
            else:
                self._strike(number, strike)

    def _done(self, number: int, strike: Strike) -> bool:
        return all((self.folder / f"mark-{number}-{n}.json").exists() for n in range(strike.times))

    def _later(self, number: int, strike: Strike) -> None:
        end = time.monotonic() + 10.0
        while strike.until and not any(self.folder.glob(strike.until)) and time.monotonic() < end:
            time.sleep(0.0005)
        time.sleep(self.draw.random() * strike.within * self.took.get(strike.phase, 0.0))
        self._strike(number, strike)

    def _strike(self, number: int, strike: Strike) -> None:
        self.folder.mkdir(exist_ok=True)
        for time_ in range(strike.times):
            mark = self.folder / f"mark-{number}-{time_}.json"
            if not mark.exists():
                word = {"time": time.monotonic(), "step": self.step, "pid": os.getpid(), "act": strike.act}
                beside = mark.with_suffix(".tmp")
                beside.write_text(json.dumps(word))
                os.rename(beside, mark)
                ACTS[strike.act](strike.text)
                return


def _posed(act: Callable[[str], None]) -> Callable[[str], None]:
    """The act as if its code were the job's: what is told of a stack goes by whose code stands in it."""
    return FunctionType(act.__code__.replace(co_filename=FILE), globals(), act.__name__)


@_posed
def _raise(text: str) -> None:
    raise ValueError(text or "posed by plait chaos")


@_posed
def _sleep(text: str) -> None:
    time.sleep(3600.0)


@_posed
def _barrier(text: str) -> None:
    dist.barrier()


@_posed
def _allocate(text: str) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def _eat(text: str) -> None:
    """Join the control group whose list of processes is `text`, and ask for more than it allows."""
    Path(text).write_text(str(os.getpid()))
    held = bytearray(EATEN)
    held[::4096] = b"x" * len(held[::4096])
    raise MemoryError("the control group did not stop this process")


@_posed
def _hold(text: str) -> None:
    """Wait for a lock in compiled code, which no signal ends, and keep the interpreter's lock meanwhile."""
    lock, system = ctypes.create_string_buffer(256), ctypes.PyDLL(None)
    for _ in range(2):
        system.pthread_mutex_lock(lock)


@_posed
def _spin(text: str) -> None:
    while True:
        pass


def _nan(text: str) -> None:
    """The output of the next module is not a number."""
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def hook(module: nn.Module, inputs: object, output: object) -> None:
        if handles and isinstance(output, Tensor) and output.is_floating_point():
            handles.pop().remove()
            output.data.mul_(float("nan"))

    handles.append(nn.modules.module.register_module_forward_hook(hook))


def _flip_a_bit(tensor: Tensor) -> None:
    """Of the element with the largest number; it is doubled, halved, or changes by an eighth."""
    at = int(tensor.flatten().abs().argmax()) * tensor.element_size() + tensor.element_size() - 2
    tensor.flatten().view(torch.uint8)[at] ^= BIT


def _flip(text: str) -> None:
    """One bit of one element of the next module that has a matrix of its own."""
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def hook(module: nn.Module, inputs: object) -> None:
        for parameter in module.parameters(recurse=False):
            if handles and parameter.dim() > 1 and parameter.numel() and parameter.is_contiguous():
                handles.pop().remove()
                _flip_a_bit(parameter.detach())

    handles.append(nn.modules.module.register_module_forward_pre_hook(hook))


def _flip_gradient(text: str) -> None:
    """One bit of one element of a gradient, before it is summed over ranks."""
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def back(gradient: Tensor) -> Tensor:
        changed = gradient.clone(memory_format=torch.contiguous_format)
        _flip_a_bit(changed)
        return changed

    def hook(module: nn.Module, inputs: object, output: object) -> None:
        if handles and isinstance(output, Tensor) and output.requires_grad:
            handles.pop().remove()
            output.register_hook(back)

    handles.append(nn.modules.module.register_module_forward_hook(hook))


def _shift_clock(text: str) -> None:
    """The wall's clock jumps by so many hours."""
    real, hours = time.time, float(text)
    time.time = lambda: real() + 3600.0 * hours


ACTS: dict[str, Callable[[str], object]] = {
    "kill": lambda text: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda text: os.kill(os.getpid(), signal.SIGSTOP),
    "segv": lambda text: ctypes.string_at(0),
    "abort": lambda text: os.abort(),
    "exit": lambda text: os._exit(7),
    "raise": _raise,
    "allocate": _allocate,
    "eat": _eat,
    "sleep": _sleep,
    "slow": lambda text: time.sleep(float(text)),
    "hold": _hold,
    "spin": _spin,
    "barrier": _barrier,
    "nan": _nan,
    "flip": _flip,
    "flip gradient": _flip_gradient,
    "clock": _shift_clock,
    "mark": lambda text: None,
}
"""What a strike can do."""
