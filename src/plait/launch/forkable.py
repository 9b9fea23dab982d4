"""Whether ranks that are forked from this process could compute: found out before the fork, since nothing of it shows in this process.

Four things spoil a process for forking. torch.cuda was used here: its context is lost in a fork. The CUDA runtime was only asked
something, such as `torch.cuda.is_available()`: that starts the driver, which is lost too, and torch marks the forks. A library beside
torch (CuPy, JAX, Numba) has started the driver. Or autograd has threads for devices, since a backward pass has run where torch sees
a device: a fork has none of them, and waits for them or raises.
"""

import os
from pathlib import Path

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
UVM = "/dev/nvidia-uvm"
"""What the CUDA driver opens when it starts; NVML, which may be asked before a fork, does not."""
AUTOGRAD = "pt_autograd_"
"""How the names of autograd's threads for devices begin."""


def stay() -> None:
    """Let `torch.cuda.is_available()` ask NVML instead of the CUDA runtime, unless the user chose: a job file that asks leaves
    this process forkable."""
    os.environ.setdefault(NVML_CHECK, "1")


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
    if UVM in _open_files():
        return f"something in this process has started the CUDA driver ({UVM} is open), which its copies could not use"
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


def _open_files() -> set[str]:
    found = set[str]()
    for path in Path("/proc/self/fd").glob("*"):
        try:
            found.add(os.readlink(path))
        except OSError:
            continue
    return found


def _fork_is_marked() -> bool:
    """Whether torch refuses CUDA to a fork of this process: one that does nothing else tells."""
    from plait.tensors.torch_private import cuda_lost

    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 1 if cuda_lost() else 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
