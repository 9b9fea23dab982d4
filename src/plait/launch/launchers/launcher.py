"""How a launcher is described: the environment variables in which it numbers what it starts. Most need nothing else. What a
launcher told this process is a `Membership`: which of how many it is, and where the first of them can be reached.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from plait.config.errors import PlaitError, Problem


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


@dataclass(frozen=True)
class Launcher:
    """Names of environment variables; where there are several, the first that is set counts."""

    name: str
    index: str
    """Which of the processes this is. Where it is not set, the launcher did not start this process."""
    count: tuple[str, ...]
    of: Literal["ranks", "nodes"] = "ranks"
    local_rank: tuple[str, ...] = ()
    local_count: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    address: tuple[str, ...] = ("MASTER_ADDR",)
    port: tuple[str, ...] = ("MASTER_PORT",)
    job: tuple[str, ...] = ()
    """All of these together tell one start from another."""

    def started(self, environment: Mapping[str, str]) -> bool:
        """Whether it started this process."""
        return self.index in environment

    def find(self, environment: Mapping[str, str]) -> Membership | None:
        """What it says of this process; None when it did not start it. L001 when its numbers do not go together."""
        if not self.started(environment):
            return None
        reading = Reading(self.name, environment)
        index, (count, least) = reading.wanted(self.index), reading.counted(*self.count)
        if count is None:
            count = reading.wanted(*self.count)
        if index >= count:
            names = f"{self.index}={index} of {reading.name(*self.count)}={count}"
            raise wrong(self.name, f"{names}: numbers begin at 0", self.index)
        return Membership(
            self.name, index, count, self.of,
            local_rank=reading.number(*self.local_rank),
            local_count=self.on_this_machine(reading),
            nodes=count if self.of == "nodes" else reading.number(*self.nodes),
            least=least,
            master=self.master(reading),
            port=reading.number(*self.port),
            job=" ".join(environment[name] for name in self.job if name in environment),
            variables=tuple(reading.read),
        )  # fmt: skip

    def on_this_machine(self, reading: "Reading") -> int | None:
        """Ranks on this machine."""
        return reading.number(*self.local_count)

    def master(self, reading: "Reading") -> str | None:
        """The machine of number 0."""
        return reading.text(*self.address)


class Reading:
    """Reads variables, and keeps the names of those that were there."""

    def __init__(self, launcher: str, environment: Mapping[str, str]):
        self.launcher, self.environment = launcher, environment
        self.read = list[str]()

    def name(self, *names: str) -> str:
        """The first of the names that is set; empty when none is."""
        return next((name for name in names if self.environment.get(name)), "")

    def text(self, *names: str) -> str | None:
        """What the first that is set says."""
        name = self.name(*names)
        if not name:
            return None
        if name not in self.read:
            self.read.append(name)
        return self.environment[name]

    def number(self, *names: str) -> int | None:
        """The same, a number. L001 when it is none."""
        said = self.text(*names)
        if said is None:
            return None
        if not (said.isascii() and said.isdecimal()):
            raise wrong(self.launcher, f"{self.name(*names)}={said} is no number", self.name(*names))
        return int(said)

    def counted(self, *names: str) -> tuple[int | None, int | None]:
        """How many there are; and, of a range such as 1:2 as torchrun has it, how many there must be at least. L001."""
        said = self.text(*names)
        if said is None or ":" not in said:
            return self.number(*names), None
        least, _, most = said.partition(":")
        if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
            raise wrong(self.launcher, f"{self.name(*names)}={said} is no number, and no range such as 1:2", self.name(*names))
        return int(most), int(least)

    def wanted(self, *names: str) -> int:
        """The same; L001 when none is set, too."""
        found = self.number(*names)
        if found is None:
            set_ = self.name(*self.read) or "nothing"
            raise wrong(self.launcher, f"{set_} is set, but {' or '.join(names)} is not", set_)
        return found


def wrong(launcher: str, why: str, name: str) -> PlaitError:
    """L001."""
    what = f"what {launcher} says of this process does not go together"
    return PlaitError(
        Problem("L001", what, why=why, fix=(f"start it with {launcher} again", f"unset {name}    to run alone"))
    )
