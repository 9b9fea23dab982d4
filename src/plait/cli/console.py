"""What a person sees while a run goes on: one live line on a terminal, a key=value line every 10 s elsewhere.

In a notebook the live line is one output of the cell that is written over, and taken away at the end. Notebooks show what is displayed
under a name again when the name is used again; no widgets are needed. In IPython on a terminal, and in Python without it, nothing is
displayed.
"""

import codecs
import os
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console as Rich
from rich.live import Live
from rich.text import Text

from plait.cli.progress import bar, clock
from plait.config.errors import shown
from plait.launch.hangs import ranks_in_words

if TYPE_CHECKING:
    from IPython.display import DisplayHandle


class InlineLine:
    """One line below a cell; nothing is there before its first text."""

    def __init__(self):
        self.handle: DisplayHandle | None = None

    @staticmethod
    def here() -> "InlineLine | None":
        """A line in the cell that is running now; None where there is no notebook."""
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        return InlineLine() if hasattr(shell, "kernel") else None

    def update(self, text: str) -> None:
        """Show this instead of what is there."""
        from IPython.display import DisplayHandle

        if self.handle is None:
            self.handle = DisplayHandle()
            self.handle.display({"text/plain": text}, raw=True)
        else:
            self.handle.update({"text/plain": text}, raw=True)

    def close(self) -> None:
        if self.handle is not None:
            self.update("")


EVERY = 10.0
"""Seconds between lines when the output is not a terminal."""
WIDE = 100
"""Characters of the live line in a notebook."""
MUCH = 4096
"""Characters of text that are laid out around the live line; more are written as they are."""
LONGEST = 10_000
"""Characters of a rank's line that are shown; its log has the whole."""
SHOWN = 3
"""Of so many numbers that a job logs, the live line has the last."""


class Console:
    """Owns the terminal. Text from ranks scrolls above the live line; repeated warnings are collapsed."""

    def __init__(self, shown: tuple[int, ...] = (0,), verbose: bool = False, out: TextIO | None = None):
        self.out = out or sys.stdout
        self.rich = Rich(file=self.out, highlight=False, soft_wrap=True, force_jupyter=False)
        self.inline = InlineLine.here() if out is None else None
        terminal = self.rich.is_terminal and self.inline is None
        self.live = Live(console=self.rich, auto_refresh=False, transient=True) if terminal else None
        self.shown, self.verbose = shown, verbose
        self.first_loss: float | None = None
        self.first_step = 1
        self.last: dict[str, Any] | None = None
        self.printed = time.monotonic()
        self.started = time.monotonic()
        self.warnings: dict[str, dict[int, int]] = {}
        self.pending: dict[str, float] = {}
        self.partial: dict[int, _Line] = {}
        self.decoders: dict[int, codecs.IncrementalDecoder] = {}

    def say(self, text: str) -> None:
        """One or more lines that stay."""
        if self.live is not None and self.live.is_started:
            if len(text) <= MUCH:
                self.rich.print(Text(shown(text)), soft_wrap=True)
                self.out.flush()
                return
            self.live.stop()  # the next status starts it again; much text is not worth laying out
        try:
            self.out.write(shown(text) + "\n")
            self.out.flush()
        except BrokenPipeError:  # whoever read the output has enough; the run goes on, its files have everything
            silent = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  what is left is flushed into it at the end
            sys.stdout, self.out = silent if self.out is sys.stdout else sys.stdout, silent

    def status(self, status: dict[str, Any]) -> None:
        """What rank 0 reports: the numbers of the live line, or an evaluation."""
        if "evaluation" in status:
            values = " ".join(f"{k} {v:.4g}" for k, v in status["evaluation"].items())
            self.say(f"evaluation at step {status['step']}: {values}")
            return
        if self.first_loss is None:
            self.first_loss, self.first_step = status["loss"], status["step"]
        self.last = status
        now = time.monotonic()
        if self.live is not None:
            if not self.live.is_started:
                self.live.start()
            self.live.update(Text(live_line(status, self.rich.width)), refresh=True)
        elif self.inline is not None:
            self.inline.update(live_line(status, WIDE))
        elif now - self.printed >= EVERY:
            self.printed = now
            self.say(plain_line(status))

    def text(self, rank: int, data: bytes) -> None:
        """Output of a rank, shown line by line when the rank is one of those chosen.

        A carriage return writes over the line, as progress bars do: what was last on it is shown.
        """
        if rank not in self.shown:
            return
        decoder = self.decoders.setdefault(rank, codecs.getincrementaldecoder("utf-8")("replace"))
        line = self.partial.setdefault(rank, _Line())
        *ended, rest = decoder.decode(data).split("\n")
        lines = [self._prefix(rank) + line.add(text).taken(rank) for text in ended]
        line.add(rest)
        if lines:
            self.say("\n".join(lines))

    def _prefix(self, rank: int) -> str:
        return "" if self.shown == (0,) else f"[rank {rank}] "

    def warning(self, rank: int, text: str) -> None:
        """Count a warning; it is shown once, a second later, with all ranks that had it by then."""
        by_rank = self.warnings.setdefault(text, {})
        if not by_rank:
            self.pending[text] = time.monotonic()
        by_rank[rank] = by_rank.get(rank, 0) + 1

    def tick(self, everything: bool = False) -> None:
        """Show what has waited long enough."""
        now = time.monotonic()
        for text in [t for t, since in self.pending.items() if everything or now - since > 1.0]:
            del self.pending[text]
            counts = self.warnings[text]
            times = sum(counts.values())
            more = f" ({times}×, full text in logs/)" if times > 1 else " (full text in logs/)"
            self.say(f"[{ranks_in_words(sorted(counts))}] {text}{more}")

    def close(self) -> None:
        """Show what is pending and take the live line away."""
        self.tick(everything=True)
        if self.live is not None and self.live.is_started:
            self.live.stop()
        if self.inline is not None:
            self.inline.close()
        for rank, decoder in self.decoders.items():
            rest = self.partial[rank].add(decoder.decode(b"", final=True)).taken(rank)
            if rest:
                self.say(self._prefix(rank) + rest)
        self.partial, self.decoders = {}, {}

    def done(self, path: Path, checkpoint: str | None) -> str:
        """The last line of a run."""
        seconds = time.monotonic() - self.started
        steps = self.last["step"] - self.first_step + 1 if self.last else 0
        loss = ""
        if self.last and self.first_loss is not None:
            loss = f" · loss {self.first_loss:.3f} → {self.last['loss']:.3f}"
        return f"done  {steps} steps in {seconds:.0f} s{loss} · checkpoint {checkpoint or 'none'} · {path}"


def live_line(s: dict[str, Any], width: int) -> str:
    """step 187/300 ━━━━━╸  loss 2.205  23 400 tok/s  (85 % of 2 × one)  mem 0.3 GiB  comm 6 %  data 0 %  ETA 0:21

    What does not fit is left out, the least important first.
    """
    head = f"step {s['step']}/{s['steps']} "
    parts = {
        "loss": f"  loss {s['loss']:.3f}",
        "logged": "".join(f"  {name} {value:.3f}" for name, value in [*s.get("logged", {}).items()][:SHOWN]),
        "rate": f"  {s['rate']:,.0f} {s['unit']}".replace(",", " "),
        "share": f"  ({s['share']:.0%} of {s['devices']} × one)",
        "memory": f"  mem {s['memory'] / 2**30:.1f} GiB",
        "comm": f"  comm {s['comm']:.0%}",
        "data": f"  data {s['data']:.0%}" + ("" if s["data_rank"] is None else f" (rank {s['data_rank']})"),
        "eta": f"  ETA {clock(s['eta'])}",
    }
    parts = {name: text.replace("%", " %") for name, text in parts.items()}
    for least in ("memory", "data", "share", "comm", "logged", "rate"):
        if len(head) + sum(map(len, parts.values())) < width:
            break
        del parts[least]
    room = max(0, min(20, width - len(head) - sum(map(len, parts.values())) - 1))
    return (head + bar(s["step"] / s["steps"], room) + "".join(parts.values()))[: width - 1]


def plain_line(s: dict[str, Any]) -> str:
    """2026-11-21T01:14:07Z step=187/300 loss=2.205 tok/s=23400 …: for logs and grep."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return (
        f"{now} step={s['step']}/{s['steps']} loss={s['loss']:.4f}"
        + "".join(f" {name}={value:.4f}" for name, value in s.get("logged", {}).items())
        + f" {s['unit']}={s['rate']:.0f} share={s['share']:.3f}"
        f" mem_gib={s['memory'] / 2**30:.2f} comm={s['comm']:.3f} data={s['data']:.3f}"
        + ("" if s["data_rank"] is None else f" data_rank={s['data_rank']}")
        + f" eta_s={s['eta']:.0f}"
    )


@dataclass
class _Line:
    """A line of a rank's output as far as it has come; of a very long one, the beginning."""

    text: str = ""
    lost: int = 0

    def add(self, more: str) -> "_Line":
        if self.lost and "\r" not in more:
            self.lost += len(more)
            return self
        whole = _last(self.text + more)
        self.text, self.lost = whole[:LONGEST], max(0, len(whole) - LONGEST)
        return self

    def taken(self, rank: int) -> str:
        """What is shown of the line, which is over."""
        more = f"… ({self.lost:,} characters more in logs/rank{rank}.log)".replace(",", " ") if self.lost else ""
        shown = self.text.rstrip("\r") + more
        self.text, self.lost = "", 0
        return shown


def _last(line: str) -> str:
    """What follows the last carriage return of a line, with those at its end: more may follow these."""
    return line[line.rstrip("\r").rfind("\r") + 1 :]
