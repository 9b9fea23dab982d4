"""`--machine here`: what this machine is. A `machine.toml` that `plait bench` wrote, or what the driver and the system say.

No CUDA call, so that forking stays possible: NVML answers when nvidia-ml-py is installed, otherwise a process of its own
asks torch. A device whose name a file of `machines/` gives has that file's data sheet.
"""

import platform
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from plait.config.errors import PlaitError, Problem
from plait.config.hardware import CORES, HOPS, REACHED, Device, Link
from plait.config.machine import Machine
from plait.config.machine_file import CATALOGUE
from plait.launch import devices
from plait.launch.find_launcher import find
from plait.launch.place import cores

FILE = Path("machine.toml")
"""Where `plait bench` writes what it measured, and where `--machine here` looks first: the current directory."""


class DeviceSeen(NamedTuple):
    """What the driver says of the first device: bytes of memory, and whether NVLinks are up (None: it was not asked)."""

    memory: int
    nvlink: bool | None


def here() -> Machine:
    """This machine, as measured if `FILE` exists, else as found."""
    return Machine.load(FILE) if FILE.exists() else found()


def found(kind: str = "auto") -> Machine:
    """This machine's devices, or its cores when it has none or `kind` is cpu. H001 as for a run."""
    from psutil import virtual_memory

    memory = min(virtual_memory().total, _limit())
    names = devices.cuda_names() if devices.kind_of(kind) == "cuda" else []
    if names:
        machine = _of_devices(names, _seen())
    else:  # every core is a device: a process with a thread; how fast they are, no data sheet says
        device = Device(_processor(), memory // cores())
        machine = Machine("here", device, devices_per_node=cores(), notes=CORES, source="found here")
    member = find()
    nodes = 1 if member is None else member.nodes or max(1, member.count // (member.local_count or member.count))
    return replace(machine, name="here", cores=cores(), host_memory=memory, nodes=nodes)


def _of_devices(names: list[str], driver: DeviceSeen) -> Machine:
    said = [tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(CATALOGUE.glob("*.toml"))]
    reported = {name.removeprefix("NVIDIA "): one["name"] for one in said for name in one.get("reported", ())}
    slug = reported.get(names[0].removeprefix("NVIDIA "))
    if slug is None:
        device = Device(names[0], driver.memory)
        return Machine("here", device, devices_per_node=len(names), source="found here; no data sheet has this name")
    machine = Machine.named(f"{slug}x{len(names)}x1")
    links = machine.links
    if driver.nvlink is False and machine.host is not None:
        bus = Link("PCIe", len(names), machine.host, HOPS["pcie"][0], "pcie", (), REACHED)
        links = (bus, *(link for link in links if link.between_nodes))
    return replace(machine, links=links, device=replace(machine.device, memory=driver.memory))


def _seen() -> DeviceSeen:
    try:
        pynvml = import_module("pynvml")  # of nvidia-ml-py
    except ImportError:
        code = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
        try:
            command = [sys.executable, "-c", code]
            asked = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
            return DeviceSeen(int(asked.stdout), None)
        except (subprocess.SubprocessError, ValueError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            what, why = "torch cannot say how much memory the first device has", said[-1] if said else ""
            fix = ("pip install nvidia-ml-py", "--machine NAME    a machine that is known by name", "--device cpu")
            raise PlaitError(Problem("H009", what, why=why, fix=fix)) from None
    pynvml.nvmlInit()
    try:
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(device).total)
        return DeviceSeen(memory, any(_up(pynvml, device, i) for i in range(18)))
    finally:
        pynvml.nvmlShutdown()


def _up(pynvml: ModuleType, device: object, link: int) -> bool:
    """Whether an NVLink is active; a device without it says that it has no such link."""
    try:
        return bool(pynvml.nvmlDeviceGetNvLinkState(device, link))
    except pynvml.NVMLError:
        return False


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "CPU"


def _limit() -> int:
    """Bytes of host memory that a container may use."""
    try:
        return int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return 2**62


def read_machine(text: str) -> Machine:
    """What ``--machine`` takes: `here`, a file, or a name."""
    if text == "here":
        return here()
    return Machine.load(text) if text.endswith(".toml") or "/" in text else Machine.named(text)
