"""Check before a fork whether the forked ranks could compute. The obstacles are invisible in this process.

Four actions make a process unusable for forking. First, it used torch.cuda, whose context is lost in a fork. Second, it called the CUDA
runtime, for example through `torch.cuda.is_available()`: this starts the driver, which is lost too, and torch marks the forks. Third,
another library (CuPy, JAX, Numba) started the driver. Fourth, a backward pass ran with a visible device, so autograd has threads for
devices. A fork has none of these threads, and waits for them or raises.

NVML calls are safe before a fork. NVML opens the same device files as the driver (/dev/nvidia-uvm since NVIDIA's driver 580), so open files
prove nothing, and the driver itself is queried.

Libraries query a device's properties when they are imported (torch's `has_triton`, by torchao), which would start CUDA. Until ranks are
forked, another fork runs these queries.
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

from plait.launch.child import fork_process

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
DRIVER_LIBRARY = "libcuda.so.1"
FORK_ANSWERED = ("get_device_properties", "current_device")
"""Functions of torch.cuda that run in a fork. torch's other queries of a device's kind use these."""
AUTOGRAD_PREFIX = "pt_autograd_"
"""Prefix of the names of autograd's threads for devices."""


def keep_forkable() -> None:
    """Make `torch.cuda.is_available()` use NVML instead of the CUDA runtime, unless the user chose.

    A job file that calls it then leaves this process forkable. If SIGCHLD is ignored, its default is restored, because no fork could be waited
    for otherwise.
    """
    os.environ.setdefault(NVML_CHECK, "1")
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def answer_by_forks() -> None:
    """From now on run device queries in forks, until CUDA is used here. Processes forked later run their own queries.

    Only for a process that ends with the command: code that relies on a query to start CUDA, as `reset_peak_memory_stats` does, fails.
    """
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return
    for name in FORK_ANSWERED:
        plain = getattr(torch.cuda, name)
        if getattr(plain, "process", None) != os.getpid():
            setattr(torch.cuda, name, _wrap_query(plain, os.getpid()))


@contextlib.contextmanager
def use_fork_answers() -> Iterator[None]:
    """Inside, device queries run in forks; afterwards in this process."""
    import torch

    plain = {name: getattr(torch.cuda, name) for name in FORK_ANSWERED}
    answer_by_forks()
    try:
        yield
    finally:
        for name, ask in plain.items():
            setattr(torch.cuda, name, ask)


def _wrap_query(plain: Callable[..., Any], process: int) -> Callable[..., Any]:
    import torch

    known = dict[str, Any]()

    @functools.wraps(plain)
    def ask(*args: Any, **options: Any) -> Any:
        if os.getpid() != process or torch.cuda.is_initialized():
            return plain(*args, **options)
        key = repr((args, options))
        if key not in known:
            values = _run_in_fork(lambda: _extract_plain_values(plain(*args, **options)))
            known[key] = SimpleNamespace(**values) if isinstance(values, dict) else values
        return plain(*args, **options) if known[key] is None else known[key]

    vars(ask)["process"] = process
    return ask


def _extract_plain_values(found: object) -> int | dict[str, int | float | str]:
    """Return an integer, or the attributes of an object that are numbers or strings. torch's object stays in its process."""
    if isinstance(found, int):
        return found
    values = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
    return {name: value for name, value in values.items() if isinstance(value, (int, float, str))}


def _run_in_fork(ask: Callable[[], Any]) -> Any:
    """Return the JSON result of a function that runs in a fork of this process; None if it raises."""
    reader, writer = os.pipe()
    pid = fork_process()
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


def find_fork_obstacle(on_devices: bool = False) -> str:
    """Return the reason why ranks forked now could not compute; empty if they can.

    `on_devices`: the ranks use devices, and not only the CPU.
    """
    import torch

    if torch.cuda.is_initialized():
        return "this process has used CUDA, which its forks cannot use"
    threads = list_autograd_threads()
    if threads:
        return f"autograd has threads for devices here ({', '.join(threads)}), which its forks lack: a backward pass has run"
    if not on_devices:
        return ""
    if is_driver_started():
        return "this process has started the CUDA driver, which its forks cannot use"
    if _is_fork_marked():
        return "this process has called the CUDA runtime, such as torch.cuda.is_available(): its forks cannot use CUDA"
    return ""


def list_autograd_threads() -> list[str]:
    """Return the names of autograd's threads for devices in this process, as far as the system lists them."""
    names = (_read_thread_name(path) for path in Path("/proc/self/task").glob("*/comm"))
    return sorted(name for name in names if name.startswith(AUTOGRAD_PREFIX))


def _read_thread_name(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the thread has ended
        return ""


def is_driver_started() -> bool:
    """Whether this process has started the CUDA driver. The check neither starts the driver nor loads its library."""
    try:
        driver = ctypes.CDLL(DRIVER_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:  # it is not loaded
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != 3  # CUDA_ERROR_NOT_INITIALIZED


def _is_fork_marked() -> bool:
    """Whether torch rejects CUDA in a fork of this process. Only a test fork shows it."""
    from plait.tensors.torch_private import is_cuda_lost

    return bool(_run_in_fork(is_cuda_lost))
