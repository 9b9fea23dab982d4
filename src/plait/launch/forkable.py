"""Whether ranks that are forked from this process could compute: found out before the fork, since nothing of it shows in this process.

Four things spoil a process for forking. torch.cuda was used here: its context is lost in a fork. The CUDA runtime was only asked
something, such as `torch.cuda.is_available()`: that starts the driver, which is lost too, and torch marks the forks. A library beside
torch (CuPy, JAX, Numba) has started the driver. Or autograd has threads for devices, since a backward pass has run where torch sees
a device: a fork has none of them, and waits for them or raises.

NVML may be asked before a fork. It opens the same files of the system as the driver does (/dev/nvidia-uvm since NVIDIA's driver 580),
so open files tell nothing: the driver itself is asked.

Libraries ask for a device's properties when they are imported (torch's `has_triton`, by torchao), which would start CUDA. While ranks
are still to be forked, another fork answers.
"""

import contextlib
import ctypes
import functools
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
DRIVER = "libcuda.so.1"
ASKED = ("get_device_properties", "current_device")
"""What of torch.cuda a fork answers. torch's other questions about a device's kind ask these."""
AUTOGRAD = "pt_autograd_"
"""How the names of autograd's threads for devices begin."""


def stay() -> None:
    """Let `torch.cuda.is_available()` ask NVML instead of the CUDA runtime, unless the user chose: a job file that asks leaves
    this process forkable. Where whoever started it ignores SIGCHLD, nobody could wait for a fork: then it is no longer ignored."""
    os.environ.setdefault(NVML_CHECK, "1")
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def answer_by_forks() -> None:
    """From here on a fork answers what is asked about devices, until CUDA is used here. What is forked later asks for itself. For a process
    that ends with the command: what counts on a question to start CUDA, as `reset_peak_memory_stats` does, fails."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return
    for name in ASKED:
        plain = getattr(torch.cuda, name)
        if getattr(plain, "process", None) != os.getpid():
            setattr(torch.cuda, name, _by_fork(plain, os.getpid()))


@contextlib.contextmanager
def answered_by_forks() -> Iterator[None]:
    """Inside, forks answer; afterwards this process asks again."""
    import torch

    plain = {name: getattr(torch.cuda, name) for name in ASKED}
    answer_by_forks()
    try:
        yield
    finally:
        for name, ask in plain.items():
            setattr(torch.cuda, name, ask)


def _by_fork(plain: Callable[..., Any], process: int) -> Callable[..., Any]:
    import torch

    known = dict[str, Any]()

    @functools.wraps(plain)
    def ask(*args: Any, **options: Any) -> Any:
        if os.getpid() != process or torch.cuda.is_initialized():
            return plain(*args, **options)
        key = repr((args, options))
        if key not in known:
            values = _in_a_fork(lambda: _plain_values(plain(*args, **options)))
            known[key] = SimpleNamespace(**values) if isinstance(values, dict) else values
        return plain(*args, **options) if known[key] is None else known[key]

    vars(ask)["process"] = process
    return ask


def _plain_values(found: object) -> int | dict[str, int | float | str]:
    """A number, or an object's attributes that are numbers or words: torch's own object stays in its process."""
    if isinstance(found, int):
        return found
    values = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
    return {name: value for name, value in values.items() if isinstance(value, (int, float, str))}


def _in_a_fork(ask: Callable[[], Any]) -> Any:
    """What a fork of this process finds, a JSON value; None where it raises."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with open(writer, "w") as to:
                json.dump(ask(), to)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(answer) if answer else None


def spoilt(on_devices: bool = False) -> str:
    """Why ranks that are forked now could not compute, or nothing. `on_devices`: they are to use devices, and not the CPU alone."""
    import torch

    if torch.cuda.is_initialized():
        return "this process has used CUDA, which its copies could not"
    threads = autograd_threads()
    if threads:
        return f"autograd has threads for devices here ({', '.join(threads)}), which its copies would lack: a backward pass has run"
    if not on_devices:
        return ""
    if driver_started():
        return "something in this process has started the CUDA driver, which its copies could not use"
    if _fork_is_marked():
        return "something in this process has asked the CUDA runtime, such as torch.cuda.is_available(): its copies could not use CUDA"
    return ""


def autograd_threads() -> list[str]:
    """The names of autograd's threads for devices in this process, as far as the system says."""
    names = (_read(path) for path in Path("/proc/self/task").glob("*/comm"))
    return sorted(name for name in names if name.startswith(AUTOGRAD))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the thread has ended
        return ""


def driver_started() -> bool:
    """Whether something in this process has started the CUDA driver. Asking does not start it, nor load its library."""
    try:
        driver = ctypes.CDLL(DRIVER, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:  # nobody has loaded it
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != 3  # CUDA_ERROR_NOT_INITIALIZED


def _fork_is_marked() -> bool:
    """Whether torch refuses CUDA to a fork of this process: one that does nothing else tells."""
    from plait.tensors.torch_private import cuda_lost

    return bool(_in_a_fork(cuda_lost))
