"""What a launcher told this process: which of how many it is, and where the first of them can be reached."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Membership:
    """This process is number `index` of `count` that one launcher started to train together."""

    launcher: str
    """Its name, as a user would type it: srun."""
    index: int
    count: int
    of: Literal["ranks", "nodes"] = "ranks"
    """`ranks`: every process is a rank. `nodes`: there is one process on each machine, and plait starts the ranks there."""
    local_rank: int | None = None
    """Which rank of its machine this is; None when nobody says it."""
    local_count: int | None = None
    """Ranks on this machine."""
    nodes: int | None = None
    """Machines; None when nobody says it."""
    least: int | None = None
    """With so many machines it may start and go on, where that was said."""
    master: str | None = None
    """Name or address of the machine of number 0."""
    port: int | None = None
    """Where number 0 listens; None: plait chooses."""
    job: str = ""
    """What tells this start from others of the same user at the same time, where the launcher says such a thing."""
    variables: tuple[str, ...] = ()
    """The environment variables that this was read from."""
    agent: bool = False
    """The launcher keeps a rendezvous store of its own, which ranks use: torchrun's agent."""

    def __str__(self) -> str:
        """srun started this process as rank 3 of 8 on 2 machines"""
        what = "rank" if self.of == "ranks" else "machine"
        where = f" on {self.nodes} machines" if self.of == "ranks" and (self.nodes or 1) > 1 else ""
        return f"{self.launcher} started this process as {what} {self.index} of {self.count}{where}"

    def told(self) -> str:
        """The line of a run's beginning: who started it, and how that is known."""
        count = f"{self.count} ranks" if self.of == "ranks" else f"one process on each of {self.count} machines"
        where = f" on {self.nodes} machines" if self.of == "ranks" and (self.nodes or 1) > 1 else ""
        return f"started by {self.launcher}: {count}{where}   (from {', '.join(self.variables)})"
