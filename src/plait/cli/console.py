"""Console output of a run: one live line on a terminal, or a key=value line every 10 s elsewhere.

In a notebook, the live line is one cell output that is updated in place and cleared at the end. It uses display handles, so no widgets
are needed. IPython on a terminal and Python without IPython display nothing.
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

from plait.cli.progress import format_bar, format_clock
from plait.config.errors import escape_controls
from plait.launch.hangs import format_ranks

if TYPE_CHECKING:
    from IPython.display import DisplayHandle


class NotebookLine:
    """One line below a notebook cell, created with its first text."""

    def __init__(self):
        self.handle: DisplayHandle | None = None

    @staticmethod
    def create_in_cell() -> "NotebookLine | None":
        """Create a line in the running cell. Returns None outside of a notebook."""
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        return NotebookLine() if hasattr(shell, "kernel") else None

    def update(self, text: str) -> None:
        """Replace the displayed text."""
        from IPython.display import DisplayHandle

        if self.handle is None:
            self.handle = DisplayHandle()
            self.handle.display({"text/plain": text}, raw=True)
        else:
            self.handle.update({"text/plain": text}, raw=True)

    def close(self) -> None:
        if self.handle is not None:
            self.update("")


LINE_INTERVAL_S = 10.0
"""Seconds between two lines if the output is not a terminal."""
NOTEBOOK_WIDTH = 100
"""Width of the live line in a notebook, in characters."""
MAX_LAID_OUT = 4096
"""Longest text that is printed above the live line, in characters. Longer text is written without layout."""
MAX_LINE_LENGTH = 10_000
"""Longest printed part of a rank's line, in characters. The rank's log has the full line."""
LOGGED_VALUES = 3
"""Maximum number of logged values in the live line: the last ones."""


class Console:
    """Owns the terminal. Text from ranks scrolls above the live line, and repeated warnings are collapsed."""

    def __init__(self, shown_ranks: tuple[int, ...] = (0,), verbose: bool = False, out: TextIO | None = None):
        self.out = out or sys.stdout
        self.rich = Rich(file=self.out, highlight=False, soft_wrap=True, force_jupyter=False)
        self.inline = NotebookLine.create_in_cell() if out is None else None
        terminal = self.rich.is_terminal and self.inline is None
        self.live = Live(console=self.rich, auto_refresh=False, transient=True) if terminal else None
        self.shown_ranks, self.verbose = shown_ranks, verbose
        self.first_loss: float | None = None
        self.first_step = 1
        self.last_status: dict[str, Any] | None = None
        self.printed = time.monotonic()
        self.started = time.monotonic()
        self.warnings: dict[str, dict[int, int]] = {}
        self.pending: dict[str, float] = {}
        self.partial_lines: dict[int, _OutputLine] = {}
        self.decoders: dict[int, codecs.IncrementalDecoder] = {}

    def print_lines(self, text: str) -> None:
        """Print lines that stay on the screen."""
        if self.live is not None and self.live.is_started:
            if len(text) <= MAX_LAID_OUT:
                self.rich.print(Text(escape_controls(text)), soft_wrap=True)
                self.out.flush()
                return
            self.live.stop()  # the next status restarts it; laying out a long text is too slow
        try:
            self.out.write(escape_controls(text) + "\n")
            self.out.flush()
        except BrokenPipeError:  # the reader closed the pipe; the run continues, and its files have all output
            silent = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  buffered output is flushed into it at exit
            sys.stdout, self.out = silent if self.out is sys.stdout else sys.stdout, silent

    def show_status(self, status: dict[str, Any]) -> None:
        """Show a status of rank 0: values for the live line, or an evaluation."""
        if "evaluation" in status:
            values = " ".join(f"{k} {v:.4g}" for k, v in status["evaluation"].items())
            self.print_lines(f"evaluation at step {status['step']}: {values}")
            return
        if self.first_loss is None:
            self.first_loss, self.first_step = status["loss"], status["step"]
        self.last_status = status
        now = time.monotonic()
        if self.live is not None:
            if not self.live.is_started:
                self.live.start()
            self.live.update(Text(format_live_line(status, self.rich.width)), refresh=True)
        elif self.inline is not None:
            self.inline.update(format_live_line(status, NOTEBOOK_WIDTH))
        elif now - self.printed >= LINE_INTERVAL_S:
            self.printed = now
            self.print_lines(format_plain_line(status))

    def add_output(self, rank: int, data: bytes) -> None:
        """Print output of a rank line by line, if the rank is among `shown_ranks`.

        A carriage return overwrites the line, as progress bars do. Only the last text of such a line is printed.
        """
        if rank not in self.shown_ranks:
            return
        decoder = self.decoders.setdefault(rank, codecs.getincrementaldecoder("utf-8")("replace"))
        line = self.partial_lines.setdefault(rank, _OutputLine())
        *ended, rest = decoder.decode(data).split("\n")
        lines = [self._format_prefix(rank) + line.add(text).take(rank) for text in ended]
        line.add(rest)
        if lines:
            self.print_lines("\n".join(lines))

    def _format_prefix(self, rank: int) -> str:
        return "" if self.shown_ranks == (0,) else f"[rank {rank}] "

    def count_warning(self, rank: int, text: str) -> None:
        """Count a warning. It is printed once, a second later, with all ranks that raised it until then."""
        by_rank = self.warnings.setdefault(text, {})
        if not by_rank:
            self.pending[text] = time.monotonic()
        by_rank[rank] = by_rank.get(rank, 0) + 1

    def show_pending(self, everything: bool = False) -> None:
        """Print warnings that are older than a second, or all with `everything`."""
        now = time.monotonic()
        for text in [t for t, since in self.pending.items() if everything or now - since > 1.0]:
            del self.pending[text]
            counts = self.warnings[text]
            times = sum(counts.values())
            more = f" ({times}×, full text in logs/)" if times > 1 else " (full text in logs/)"
            self.print_lines(f"[{format_ranks(sorted(counts))}] {text}{more}")

    def close(self) -> None:
        """Print pending warnings and lines, and remove the live line."""
        self.show_pending(everything=True)
        if self.live is not None and self.live.is_started:
            self.live.stop()
        if self.inline is not None:
            self.inline.close()
        for rank, decoder in self.decoders.items():
            rest = self.partial_lines[rank].add(decoder.decode(b"", final=True)).take(rank)
            if rest:
                self.print_lines(self._format_prefix(rank) + rest)
        self.partial_lines, self.decoders = {}, {}

    def format_summary(self, path: Path, checkpoint: str | None) -> str:
        """Format the last line of a run."""
        seconds = time.monotonic() - self.started
        steps = self.last_status["step"] - self.first_step + 1 if self.last_status else 0
        loss = ""
        if self.last_status and self.first_loss is not None:
            loss = f" · loss {self.first_loss:.3f} → {self.last_status['loss']:.3f}"
        return f"done  {steps} steps in {seconds:.0f} s{loss} · checkpoint {checkpoint or 'none'} · {path}"


def format_live_line(s: dict[str, Any], width: int) -> str:
    """Format the live line, which omits the least important values first if `width` is too small.

    Example: step 187/300 ━━━━━╸  loss 2.205  23 400 tok/s  (85 % of 2 × one)  mem 0.3 GiB  comm 6 %  data 0 %  ETA 0:21
    """
    head = f"step {s['step']}/{s['steps']} "
    parts = {
        "loss": f"  loss {s['loss']:.3f}",
        "logged": "".join(f"  {name} {value:.3f}" for name, value in [*s.get("logged", {}).items()][:LOGGED_VALUES]),
        "rate": f"  {s['rate']:,.0f} {s['unit']}".replace(",", " "),
        "share": f"  ({s['share']:.0%} of {s['devices']} × one)",
        "memory": f"  mem {s['memory'] / 2**30:.1f} GiB",
        "comm": f"  comm {s['comm']:.0%}",
        "data": f"  data {s['data']:.0%}" + ("" if s["data_rank"] is None else f" (rank {s['data_rank']})"),
        "eta": f"  ETA {format_clock(s['eta'])}",
    }
    parts = {name: text.replace("%", " %") for name, text in parts.items()}
    for least in ("memory", "data", "share", "comm", "logged", "rate"):
        if len(head) + sum(map(len, parts.values())) < width:
            break
        del parts[least]
    room = max(0, min(20, width - len(head) - sum(map(len, parts.values())) - 1))
    return (head + format_bar(s["step"] / s["steps"], room) + "".join(parts.values()))[: width - 1]


def format_plain_line(s: dict[str, Any]) -> str:
    """Format a line for logs and grep: 2026-11-21T01:14:07Z step=187/300 loss=2.205 tok/s=23400 …"""
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
class _OutputLine:
    """The received part of a rank's output line, up to `MAX_LINE_LENGTH` characters."""

    text: str = ""
    dropped: int = 0

    def add(self, more: str) -> "_OutputLine":
        if self.dropped and "\r" not in more:
            self.dropped += len(more)
            return self
        whole = _drop_overwritten(self.text + more)
        self.text, self.dropped = whole[:MAX_LINE_LENGTH], max(0, len(whole) - MAX_LINE_LENGTH)
        return self

    def take(self, rank: int) -> str:
        """Return the printed form of the complete line, and reset it."""
        more = f"… ({self.dropped:,} characters more in logs/rank{rank}.log)".replace(",", " ") if self.dropped else ""
        shown = self.text.rstrip("\r") + more
        self.text, self.dropped = "", 0
        return shown


def _drop_overwritten(line: str) -> str:
    """Return the text after the last carriage return. Carriage returns at the end stay, because more text may follow."""
    return line[line.rstrip("\r").rfind("\r") + 1 :]
