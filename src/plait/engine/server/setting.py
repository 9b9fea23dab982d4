"""What groups and servers know before they are forked: the job, the plan, where the servers listen, and the run's key."""

import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from plait.config.job import Job
from plait.config.plan import Plan
from plait.engine.server.dealing import Rules
from plait.launch import limits
from plait.launch.loopback import LocalStore


@dataclass(frozen=True)
class Doors:
    """Where servers listen, open before anyone is forked: who is forked later finds them too."""

    key: bytes
    listening: tuple[socket.socket, ...]
    store: LocalStore | None
    """Of the process group among servers, where there are several."""

    @staticmethod
    def open(servers: int) -> "Doors":
        store = LocalStore() if servers > 1 else None
        return Doors(secrets.token_bytes(32), tuple(limits.listening() for _ in range(servers)), store)

    @property
    def ports(self) -> list[int]:
        return [door.getsockname()[1] for door in self.listening]

    def close(self) -> None:
        for door in self.listening:
            door.close()
        if self.store is not None:
            self.store.close()


@dataclass(frozen=True)
class ServerSetting:
    """One run of groups and servers."""

    job: Job
    plan: Plan
    device: str = "auto"
    cast: torch.dtype | None = None
    on_nan: str = "stop"
    folder: Path | None = None
    """The run's directory: without one nothing is written."""
    save_every: int = 100
    keep: int = 3
    resume: str | None = None
    allow_changes: bool = False
    arguments: dict[str, str] = field(default_factory=dict)
    pause: Callable[[int, int], float] = field(default=lambda group, ticket: 0.0)
    """Seconds that a group waits before a portion: for proofs and tests."""
    evaluates: bool = True
    described: Callable[[], Any] = field(default=lambda: None)
    """Called by the lead once a checkpoint was resumed: writes down what the run is now."""

    @property
    def rules(self) -> Rules:
        plan = self.plan
        return Rules(plan.replica_groups, plan.staleness, plan.server_update == "nesterov", plan.quorum)
