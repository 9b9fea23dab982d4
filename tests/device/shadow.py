"""A pretended CUDA: tensors on "cuda" whose memory is the host's (see shadow.cpp), in a torch without CUDA.

    shadow.load(library, devices=4)      # in a fresh process, before anything imports torch

A tensor of the host beside one of the device is an error, as on CUDA. Whatever makes the host wait for the device is counted, with the
line of plait it comes from: a number that is read, a blocking copy, an operator whose result has a size that depends on its numbers.
It has one stream: it shows no races, no overlap and no speed.
"""

import ctypes
import importlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

READS = {"aten::_local_scalar_dense": "a number is read"}
TELL = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)
KEPT: list[Any] = []
"""What must not be collected: functions that C++ calls, and torch's registrations."""


class Waits:
    """What made the host wait, while it was counted: how, and the innermost line of plait."""

    def __init__(self) -> None:
        self.found, self.counting = Counter[str](), False

    def note(self, what: str) -> None:
        if self.counting:
            self.found[f"{_line()}: {what}"] += 1

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        self.found, self.counting = Counter(), True
        try:
            yield self.found
        finally:
            self.counting = False


WAITS = Waits()


def _line() -> str:
    """Below the modes that look on, and outside of torch and of the doubles."""
    doubles = ("device/shadow.py", "device/nccl.py", "device/nccl_kernels.py")
    frames = [f for f in traceback.extract_stack() if not f.filename.endswith(doubles)]
    own = [f for f in frames if "site-packages" not in f.filename and not f.name.startswith("__torch_")]
    at = (own or frames)[-1]
    path = at.filename.rpartition("/plait/" if "/src/plait/" in at.filename else "/tests/")[2]
    return f"{path}:{at.lineno}"


def _told(op: bytes, how: bytes, size: int) -> None:
    if how == b"non_blocking":
        return  # queued behind what computes what is copied
    name = READS.get(op.decode(), op.decode().removeprefix("aten::"))
    WAITS.note(f"{name}{f' of {size} bytes' if how else ''}")


class Stream:
    """The only one."""

    def __init__(self, *args: Any, **kwargs: Any):
        import torch

        self.device = torch.device("cuda", torch.cuda.current_device())

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        WAITS.note("stream.synchronize")


class Event:
    """Recorded at once."""

    def __init__(self, *args: Any, **kwargs: Any): ...

    def record(self, *args: object) -> None: ...

    def wait(self, *args: object) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 1.0

    def synchronize(self) -> None:
        WAITS.note("event.synchronize")


def load(library: Path, devices: int) -> None:
    """Put the devices there. From here on this process, and its forks, see them."""
    lent = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    lent.shadow_put(devices)
    KEPT.append(TELL(_told))
    lent.shadow_tell(KEPT[-1])
    for name in ("_dynamo", "_inductor", "distributed.fsdp"):  # as long as they see that this torch has no CUDA
        importlib.import_module(f"torch.{name}")
    _devices(lent, devices)
    _memory()
    _storages()


def _devices(lent: ctypes.CDLL, count: int) -> None:
    import torch

    cuda, state = torch.cuda, {"init": False}

    def init() -> None:
        state["init"] = cuda._initialized = True

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if not 0 <= index < count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        init()
        lent.shadow_set_device(index)

    class Device(nullcontext[None]):
        def __init__(self, device: object):
            super().__init__()

    only = Stream.__new__(Stream)
    only.device = torch.device("cuda", 0)
    known: dict[str, Any] = {
        "_lazy_init": init, "init": init, "_is_compiled": lambda: True, "is_available": lambda: True,
        "device_count": lambda: count, "_device_count_nvml": lambda: count, "is_initialized": lambda: state["init"],
        "set_device": set_device, "current_device": lent.shadow_current_device, "device": Device,
        "Stream": Stream, "Event": Event, "current_stream": lambda *a: only, "default_stream": lambda *a: only,
        "stream": lambda stream: nullcontext(), "synchronize": lambda *a: WAITS.note("cuda.synchronize"),
        "get_device_capability": lambda *a: (9, 0), "get_device_name": lambda *a: "pretended",
        "is_bf16_supported": lambda *a, **k: True, "is_current_stream_capturing": lambda: False,
        "manual_seed": lambda seed: None, "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda *a: torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda *a, **k: None,
    }  # fmt: skip
    for name, value in known.items():
        setattr(cuda, name, value)
    torch.version.cuda = "12.8"


def _memory() -> None:
    """Its statistics, which nobody has; pinned memory, of which there is none."""
    import torch

    for name in ("max_memory_allocated", "memory_allocated", "max_memory_reserved", "memory_reserved"):
        setattr(torch.cuda, name, lambda *a: 0)
    torch.cuda.mem_get_info = lambda *a: (1 << 36, 1 << 36)
    torch.cuda.reset_peak_memory_stats = torch.cuda.empty_cache = lambda *a: None
    torch.Tensor.pin_memory = lambda self, *a: self
    torch.Tensor.is_pinned = lambda self, *a: False
    torch.Tensor.record_stream = lambda self, stream: None
    plain = torch.empty

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return plain(*args, **kwargs)

    torch.empty = empty


def _storages() -> None:
    """What torch does to storages of a device in C++ that is not there: copies, and FSDP2's changes of their size."""
    import sys

    import torch
    from torch.storage import _StorageBase

    plain = _StorageBase.clone

    def clone(self: Any) -> Any:
        if self.device.type != "cuda":
            return plain(self)
        copy = torch.zeros(self.nbytes(), dtype=torch.uint8, device=self.device)
        ctypes.memmove(copy.data_ptr(), self.data_ptr(), self.nbytes())
        return copy.untyped_storage()

    _StorageBase.clone = torch.UntypedStorage.clone = clone

    def resized(t: torch.Tensor, size: int) -> None:
        if t.untyped_storage().size() != size:
            torch.ops.shadow.resize(t, size) if t.is_cuda else t.untyped_storage().resize_(size)

    ways: dict[str, Callable[[torch.Tensor], None]] = {
        "alloc_storage": lambda t: resized(t, t.numel() * t.itemsize), "free_storage": lambda t: resized(t, 0),
    }  # fmt: skip
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.fsdp._fully_shard"):
            for way in ways.keys() & vars(module).keys():
                setattr(module, way, ways[way])
    KEPT.append(torch.library.Library("aten", "IMPL"))
    host = torch.ops.shadow.host

    def histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
        return torch.histc(host(x).float(), bins, min, max).to(x.dtype).to(x.device)

    KEPT[-1].impl("histc", histc, "CUDA")
