"""Snapshots on several machines: each keeps in its memory what its own ranks wrote, and a copy of what a neighbour's ranks wrote.

Memory is not shared between machines, so nobody has the whole state, and nothing is published: a snapshot is a folder of pieces on
each machine. When a rank is lost, the pieces of all machines are brought together (`engine/elastic.py`); when a whole machine is lost,
its neighbour has its pieces. What ranks send each other goes over a group of its own, in the thread that writes.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from plait.checkpoint.checkpoints import Checkpoints, PendingSave
from plait.checkpoint.training import Training

PIECES = "pieces-"
"""The folder of a step's pieces is called so, and has the step's number."""
KEPT = 2
"""Snapshots that a machine keeps: machines may differ by one in which is the newest."""


@dataclass(frozen=True)
class Neighbours:
    """Which rank of another machine gets a copy of this one's pieces, and whose copies this one gets."""

    to: int
    of: tuple[int, ...]
    kept: int
    """Ranks whose pieces lie on this machine."""


class Pieces(Checkpoints):
    """Snapshots of which this machine has its ranks' pieces and those of their neighbours. All ranks make one."""

    def __init__(self, directory: Path, neighbours: Neighbours):
        super().__init__(directory)
        self.neighbours = neighbours
        group = dist.new_group(backend="gloo")
        assert isinstance(group, ProcessGroup)
        self.group = group

    def publishes(self, training: Training) -> bool:
        """Every rank tries to; the first one of a machine does."""
        return True

    def write(self, work: Callable[[Callable[[], bool]], None], building: Path) -> Callable[[Callable[[], bool]], None]:
        """Write this rank's part, and exchange it."""

        def both(cancelled: Callable[[], bool]) -> None:
            work(cancelled)
            self._exchange(building)

        return both

    def publish(self, flight: PendingSave, ranks: int) -> None:
        """Every rank of this machine has its pieces: now they count."""
        step = int(flight.path.name[5:])
        with contextlib.suppress(OSError):  # another rank of this machine was first
            os.rename(flight.building, flight.path.with_name(f"{PIECES}{step}"))
            for old in sorted(self.directory.glob(f"{PIECES}*"), key=lambda p: -int(p.name.removeprefix(PIECES)))[
                KEPT:
            ]:
                shutil.rmtree(old, ignore_errors=True)

    def _exchange(self, building: Path) -> None:
        """Send this rank's files to a rank of the next machine, and write those that come."""
        rank = dist.get_rank()
        files = sorted(building.glob(f"*-{rank:05d}.*"))
        names = json.dumps([[file.name, file.stat().st_size] for file in files]).encode()
        sent: list[Any] = []
        for payload in (
            torch.tensor([len(names)]),
            torch.frombuffer(bytearray(names), dtype=torch.uint8),
            *map(_mapped, files),
        ):
            sent.append((dist.isend(payload, self.neighbours.to, group=self.group), payload))
        for source in self.neighbours.of:
            self._receive(source, building)
        for work, _ in sent:
            work.wait()

    def _receive(self, source: int, building: Path) -> None:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, source, group=self.group)
        names = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(names, source, group=self.group)
        come: list[tuple[Path, Path]] = []
        for name, size in json.loads(bytes(names.tolist())):
            beside = building / f".{Path(name).name}"
            content = torch.from_file(str(beside), shared=True, size=size, dtype=torch.uint8)
            dist.recv(content, source, group=self.group)
            come.append((beside, building / Path(name).name))
        for beside, place in sorted(come, key=lambda pair: pair[1].suffix == ".json"):  # the list of the files last
            os.rename(beside, place)


def _mapped(file: Path) -> torch.Tensor:
    return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
