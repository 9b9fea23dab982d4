"""A simulated CUDA: tensors on "cuda" whose memory is the host's (see shadow.cpp), in a torch without CUDA.

    shadow.load(library, devices=4)      # in a fresh process, before torch is imported

If a process has used CUDA, or called its runtime, its forks cannot use it.
An operator on both a host tensor and a device tensor is an error, as on CUDA. Each wait of the host for the device is counted, with the
line of plait that causes it: a value that is read, a blocking copy, an operator whose output size depends on its values.
If a stream uses a tensor without waiting for the stream that writes it, that is an error too (clocks.h). Overlap and speed are not
simulated.
"""

import ctypes
import importlib
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

READS = {"aten::_local_scalar_dense": "a number is read"}
TELL = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)
KEPT: list[Any] = []
"""Objects that must not be garbage-collected: functions that C++ calls, and torch's registrations."""


class Waits:
    """The waits of the host while they were counted: the reason, and the innermost line of plait."""

    def __init__(self) -> None:
        self.found, self.counting = Counter[str](), False
        self.unpinned = Counter[str]()
        """Asynchronous copies from memory that is not pinned. Such a copy cannot overlap with the host."""

    def note(self, what: str, waits: bool = True) -> None:
        if self.counting:
            (self.found if waits else self.unpinned)[f"{_line()}: {what}"] += 1

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        self.found, self.unpinned, self.counting = Counter(), Counter(), True
        try:
            yield self.found
        finally:
            self.counting = False


WAITS = Waits()


def _line() -> str:
    """Return the line below torch's modes, and outside of torch and of the doubles."""
    doubles = ("device/shadow.py", "device/nccl.py", "device/nccl_kernels.py")
    frames = [f for f in traceback.extract_stack() if not f.filename.endswith(doubles)]
    own = [f for f in frames if "site-packages" not in f.filename and not f.name.startswith("__torch_")]
    at = (own or frames)[-1]
    path = at.filename.rpartition("/plait/" if "/src/plait/" in at.filename else "/tests/")[2]
    return f"{path}:{at.lineno}"


def _told(op: bytes, how: bytes, size: int) -> None:
    if how == b"non_blocking":
        return  # queued after the kernels that compute its source
    name = READS.get(op.decode(), op.decode().removeprefix("aten::"))
    WAITS.note(f"{name}{f' of {size} bytes' if how else ''}", waits=how != b"not pinned")


HOST, COMMUNICATORS, LAST = 63, 32, 62
"""The indices of clocks: of the host, and of the first and the last communicator. Streams have the lower indices."""


class Stream:
    """A stream, with a record of the events it has waited for."""

    def __init__(self, *args: Any, **kwargs: Any):
        import torch

        self.device = torch.device("cuda", torch.cuda.current_device())
        self.number = next(NUMBERS)
        assert self.number < COMMUNICATORS, "too many streams"

    def wait_stream(self, stream: "Stream") -> None:
        LENT[0].clocks_merge(self.number, stream.number)

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        WAITS.note("stream.synchronize")
        LENT[0].clocks_merge(HOST, self.number)


class Event:
    """The work of a stream up to a point. A host that waits for an event without `blocking` spins."""

    def __init__(self, *args: Any, blocking: bool = False, **kwargs: Any):
        self.number, self.blocking = -1, blocking

    def record(self, stream: Stream | None = None) -> None:
        self.number = LENT[0].clocks_record(LENT[0].clocks_current() if stream is None else stream.number)

    def wait(self, stream: Stream | None = None) -> None:
        if self.number >= 0:
            LENT[0].clocks_wait(LENT[0].clocks_current() if stream is None else stream.number, self.number)

    def query(self) -> bool:
        """Whether the event is known to have ended: the host has waited for it, or for a later one. It may have ended earlier."""
        return self.number < 0 or bool(LENT[0].clocks_over(self.number))

    def elapsed_time(self, other: "Event") -> float:
        if not (self.query() and other.query()):
            raise RuntimeError("CUDA error: device not ready: an event's time is asked for, and the host has not waited for it")
        return 1.0

    def synchronize(self) -> None:
        WAITS.note("event.synchronize" if self.blocking else "event.synchronize, which spins")
        if self.number >= 0:
            LENT[0].clocks_wait(HOST, self.number)


class Communicators:
    """The streams of communicators. An operation starts after the current work of the current stream, and its end is an event."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}

    def ask(self, key: object, reads: Sequence[Any], writes: Sequence[Any]) -> Event:
        import torch

        number = self.numbers.setdefault(key, min(COMMUNICATORS + len(self.numbers), LAST))
        LENT[0].clocks_merge(number, LENT[0].clocks_current())
        LENT[0].clocks_start(number)
        for tensors, write in ((reads, False), (writes, True)):
            for t in tensors:
                torch.ops.shadow.used(t.detach(), number, write)
        end = Event()
        end.number = LENT[0].clocks_record(number)
        return end


@contextmanager
def on(stream: Stream | None) -> Iterator[None]:
    """`torch.cuda.stream`."""
    before = LENT[0].clocks_current()
    LENT[0].clocks_use(before if stream is None else stream.number)
    try:
        yield
    finally:
        LENT[0].clocks_use(before)


def check_freed() -> None:
    """Raise an error if memory was returned to one stream while another used it."""
    if told := LENT[0].clocks_freed().decode():
        raise RuntimeError(f"a race between streams: {told}")


COUNTS = (
    *(f"{what}_bytes.all.{when}" for when in ("current", "peak") for what in ("requested", "allocated", "reserved")),
    "num_alloc_retries", "num_ooms", "size", "beside",
)  # fmt: skip
"""The values of `blocks_read`, by the names of `torch.cuda.memory_stats`."""
NUMBERS = count(1)
LENT: list[ctypes.CDLL] = []


def load(library: Path, devices: int) -> None:
    """Create the devices. From here on, this process and its forks have them."""
    lent = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    LENT.append(lent)
    lent.clocks_freed.restype = ctypes.c_char_p
    lent.blocks_size.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    lent.clocks_record.restype, lent.clocks_wait.argtypes = ctypes.c_int64, (ctypes.c_int, ctypes.c_int64)
    lent.clocks_over.argtypes = (ctypes.c_int64,)
    lent.shadow_put(devices)
    lent.clocks_watch(1)
    KEPT.append(TELL(_told))
    lent.shadow_tell(KEPT[-1])
    for name in ("_dynamo", "_inductor", "distributed.fsdp"):  # as long as they see a torch without CUDA
        importlib.import_module(f"torch.{name}")
    _devices(lent, devices)
    _memory()
    _storages()


def _devices(lent: ctypes.CDLL, devices: int) -> None:
    import torch

    cuda, state = torch.cuda, {"init": False, "asked": False, "lost": False}

    def init() -> None:
        if state["lost"]:
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, use 'spawn'"
            )
        state["init"] = state["asked"] = cuda._initialized = True

    def is_available() -> bool:
        """Calls NVML, or the runtime, which starts the driver: then CUDA is unusable after a fork."""
        state["asked"] |= os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") != "1"
        return True

    os.register_at_fork(after_in_child=lambda: state.update(lost=state["asked"] or state["lost"]))

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if not 0 <= index < devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        init()
        lent.shadow_set_device(index)

    class Device(nullcontext[None]):
        def __init__(self, device: object):
            super().__init__()

    default = Stream.__new__(Stream)
    default.device, default.number = torch.device("cuda", 0), 0

    def current_stream(*args: object) -> Stream:
        stream = Stream.__new__(Stream)
        stream.device, stream.number = torch.device("cuda", cuda.current_device()), lent.clocks_current()
        return stream

    def synchronize(*args: object) -> None:
        WAITS.note("cuda.synchronize")
        for number in range(HOST):
            lent.clocks_merge(HOST, number)

    known: dict[str, Any] = {
        "_lazy_init": init, "init": init, "_is_compiled": lambda: True, "is_available": is_available,
        "device_count": lambda: devices, "_device_count_nvml": lambda: devices, "_is_in_bad_fork": lambda: state["lost"],
        "is_initialized": lambda: state["init"] and not state["lost"],
        "set_device": set_device, "current_device": lent.shadow_current_device, "device": Device,
        "Stream": Stream, "Event": Event, "current_stream": current_stream, "default_stream": lambda *a: default,
        "stream": on, "synchronize": synchronize,
        "get_device_capability": lambda *a: (9, 0), "get_device_name": lambda *a: "pretended",
        "is_bf16_supported": lambda *a, **k: True, "is_current_stream_capturing": lambda: False,
        "manual_seed": lambda seed: None, "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda *a: torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda *a, **k: None,
    }  # fmt: skip
    for name, value in known.items():
        setattr(cuda, name, value)
    torch.version.cuda = "12.8"
    torch.utils._triton.has_triton_package = lambda: False  # if installed, its kernels cannot run on host memory


def _memory() -> None:
    """The allocator's statistics (blocks.h), and pinned memory."""
    import torch

    lent = LENT[0]

    def number(device: Any) -> int:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        return torch.cuda.current_device() if index is None else index

    def read(device: Any) -> dict[str, int]:
        row = (ctypes.c_int64 * len(COUNTS))()
        lent.blocks_read(number(device), row)
        return dict(zip(COUNTS, row))

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        found = read(device)
        return found["size"] - found["beside"] - found["reserved_bytes.all.current"], found["size"]

    for name, key in (("memory_allocated", "allocated"), ("memory_reserved", "reserved")):
        setattr(torch.cuda, name, lambda device=None, key=key: read(device)[f"{key}_bytes.all.current"])
        setattr(torch.cuda, f"max_{name}", lambda device=None, key=key: read(device)[f"{key}_bytes.all.peak"])
    torch.cuda.memory_stats, torch.cuda.mem_get_info = (lambda device=None: read(device)), mem_get_info
    torch.cuda.reset_peak_memory_stats = lambda device=None: lent.blocks_reset_peak(number(device))
    torch.cuda.empty_cache = lent.blocks_empty_cache
    torch.Tensor.record_stream = lambda self, stream: torch.ops.shadow.recorded(self.detach(), stream.number)
    plain, like, shadow = torch.empty, torch.empty_like, torch.ops.shadow

    def pinned(t: torch.Tensor) -> torch.Tensor:
        return shadow.pin(t) if type(t) is torch.Tensor else t

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = plain(*args, **kwargs)
        return pinned(made) if pin_memory else made

    def empty_like(t: torch.Tensor, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = like(t, *args, **kwargs)
        return pinned(made) if pin_memory else made

    torch.empty, torch.empty_like = empty, empty_like
    torch.Tensor.pin_memory = lambda self, *a: pinned(self)
    torch.Tensor.is_pinned = lambda self, *a: type(self) is torch.Tensor and shadow.is_pinned(self)


def _storages() -> None:
    """The storage functions for devices that torch's C++ lacks here: copies, and FSDP2's resizing."""
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
