"""Faults inside a rank, at a step and phase: a strike, inserted between the rank and its place (see `launch/place.py`).

A rank reports the beginning of each phase to its place. A strike listens to these reports and acts, once or several times. Before it acts,
it writes a mark to a folder: time, step and process. The training code does not depend on it.
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

POSED_FILE = "a-fault-that-was-posed.py"
"""File name of the acts' code in tracebacks."""
FLIPPED_BIT = 1 << 4
"""The bit of a byte that flips."""
EXHAUST_BYTES = 1 << 30
"""Bytes that a rank allocates to exceed the limit of its control group."""


@dataclass(frozen=True)
class Strike:
    """Run `act` on `rank` at the beginning of `phase` after `step` completed steps, or later if the rank did not enter that phase then."""

    act: str
    phase: str = "forward"
    step: int = -1
    rank: int = 1
    times: int = 1
    within: float = 0.0
    """Delay into the phase, as a fraction of its previous duration. Only for acts that a thread can do to its process."""
    until: str = ""
    """A pattern of files, relative to the folder of marks: strike as soon as one exists."""
    after: str = ""
    """Strike only after the strike with this act."""
    text: str = ""
    """Argument of the act."""
    always: bool = False
    """Strike also in restarts with another number of ranks."""


@dataclass(frozen=True)
class Mark:
    """Record of a strike."""

    time: float
    step: int
    pid: int
    act: str


def read_marks(folder: Path) -> list[Mark]:
    """Read all marks in order of time, without those of slowing down."""
    found = [Mark(**json.loads(path.read_text())) for path in folder.glob("mark-*.json")]
    return sorted((mark for mark in found if mark.act != "slow"), key=lambda mark: mark.time)


def add_strikes(strikes: tuple[Strike, ...], folder: Path, seed: int, world: int) -> Callable[[Place], Place]:
    """Return a function that adds the strikes of a rank to its place, in runs of `world` ranks."""

    def around(place: Place) -> Place:
        there = lambda strike: strike.rank == place.rank and (strike.always or world == place.world)  # noqa: E731
        striker = Striker({n: strike for n, strike in enumerate(strikes) if there(strike)}, folder, seed)

        def beat(step: int, phase: str) -> None:
            place.beat(step, phase)
            striker.begin_phase(step, phase)

        def reads() -> None:
            place.mark_read()
            striker.read_sample()

        return replace(place, beat=beat, mark_read=reads) if striker.strikes else place

    return around


class Striker:
    """The strikes of one process, by number. It is called at every phase and sample, and acts if a strike is due.

    `folder`: of the marks. A restarted process finds there the strikes that were done before. `plait chaos` adds a striker to a rank's
    place. Jobs without such a place (other launchers, tests, `bench/faults.py`) call `begin_phase` themselves.
    """

    def __init__(self, strikes: Mapping[int, Strike], folder: Path, seed: int = 0):
        self.strikes, self.folder = strikes, folder
        self.rng, self.pid = random.Random(seed), os.getpid()
        self.took: dict[str, float] = {}
        self.phase, self.began, self.step = "start", time.monotonic(), -1

    def begin_phase(self, step: int, phase: str) -> None:
        """Handle the beginning of a phase."""
        now = time.monotonic()
        self.took[self.phase] = now - self.began
        self.phase, self.began, self.step = phase, now, step
        self._strike_due(phase)

    def read_sample(self) -> None:
        """Handle the reading of a sample, by the process itself or by a loader process that it forked."""
        self._strike_due("read" if os.getpid() == self.pid else "loader")

    def _strike_due(self, phase: str) -> None:
        for number, strike in self.strikes.items():
            if strike.phase != phase or strike.step > self.step or self._is_done(number, strike):
                continue
            if strike.after and not any(mark.act == strike.after for mark in read_marks(self.folder)):
                continue
            if strike.until or strike.within:
                threading.Thread(target=self._strike_later, args=(number, strike), daemon=True).start()
            else:
                self._strike(number, strike)

    def _is_done(self, number: int, strike: Strike) -> bool:
        return all((self.folder / f"mark-{number}-{n}.json").exists() for n in range(strike.times))

    def _strike_later(self, number: int, strike: Strike) -> None:
        end = time.monotonic() + 10.0
        while strike.until and not any(self.folder.glob(strike.until)) and time.monotonic() < end:
            time.sleep(0.0005)
        time.sleep(self.rng.random() * strike.within * self.took.get(strike.phase, 0.0))
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


def _disguise_code(act: Callable[[str], None]) -> Callable[[str], None]:
    """Make the act's code look like code of the job: reports of a stack depend on the file of each frame."""
    return FunctionType(act.__code__.replace(co_filename=POSED_FILE), globals(), act.__name__)


@_disguise_code
def _raise_error(text: str) -> None:
    raise ValueError(text or "posed by plait chaos")


@_disguise_code
def _sleep_hour(text: str) -> None:
    time.sleep(3600.0)


@_disguise_code
def _call_barrier(text: str) -> None:
    dist.barrier()


@_disguise_code
def _allocate_memory(text: str) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def _exhaust_memory(text: str) -> None:
    """Join the control group whose process list is the file `text`, and allocate more than its limit."""
    Path(text).write_text(str(os.getpid()))
    held = bytearray(EXHAUST_BYTES)
    held[::4096] = b"x" * len(held[::4096])
    raise MemoryError("the control group did not stop this process")


@_disguise_code
def _hold_lock(text: str) -> None:
    """Wait for a lock in compiled code, which no signal interrupts, with the GIL locked."""
    lock, system = ctypes.create_string_buffer(256), ctypes.PyDLL(None)
    for _ in range(2):
        system.pthread_mutex_lock(lock)


@_disguise_code
def _loop_forever(text: str) -> None:
    while True:
        pass


def _poison_output(text: str) -> None:
    """Make the output of the next module NaN."""
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def hook(module: nn.Module, inputs: object, output: object) -> None:
        if handles and isinstance(output, Tensor) and output.is_floating_point():
            handles.pop().remove()
            output.data.mul_(float("nan"))

    handles.append(nn.modules.module.register_module_forward_hook(hook))


def _flip_bit(tensor: Tensor) -> None:
    """Flip a bit of the element with the largest absolute value: it is doubled, halved, or changes by an eighth."""
    at = int(tensor.flatten().abs().argmax()) * tensor.element_size() + tensor.element_size() - 2
    tensor.flatten().view(torch.uint8)[at] ^= FLIPPED_BIT


def _flip_weight_bit(text: str) -> None:
    """Flip one bit in the next module that has a weight matrix."""
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def hook(module: nn.Module, inputs: object) -> None:
        for parameter in module.parameters(recurse=False):
            if handles and parameter.dim() > 1 and parameter.numel() and parameter.is_contiguous():
                handles.pop().remove()
                _flip_bit(parameter.detach())

    handles.append(nn.modules.module.register_module_forward_pre_hook(hook))


def _flip_gradient_bit(text: str) -> None:
    """Flip one bit of a gradient before the all-reduce."""
    handles: list[torch.utils.hooks.RemovableHandle] = []

    def back(gradient: Tensor) -> Tensor:
        changed = gradient.clone(memory_format=torch.contiguous_format)
        _flip_bit(changed)
        return changed

    def hook(module: nn.Module, inputs: object, output: object) -> None:
        if handles and isinstance(output, Tensor) and output.requires_grad:
            handles.pop().remove()
            output.register_hook(back)

    handles.append(nn.modules.module.register_module_forward_hook(hook))


def _shift_clock(text: str) -> None:
    """Let the wall clock jump by `text` hours."""
    real, hours = time.time, float(text)
    time.time = lambda: real() + 3600.0 * hours


ACTS: dict[str, Callable[[str], object]] = {
    "kill": lambda text: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda text: os.kill(os.getpid(), signal.SIGSTOP),
    "segv": lambda text: ctypes.string_at(0),
    "abort": lambda text: os.abort(),
    "exit": lambda text: os._exit(7),
    "raise": _raise_error,
    "allocate": _allocate_memory,
    "eat": _exhaust_memory,
    "sleep": _sleep_hour,
    "slow": lambda text: time.sleep(float(text)),
    "hold": _hold_lock,
    "spin": _loop_forever,
    "barrier": _call_barrier,
    "nan": _poison_output,
    "flip": _flip_weight_bit,
    "flip gradient": _flip_gradient_bit,
    "clock": _shift_clock,
    "mark": lambda text: None,
}
"""All acts by name."""
