"""The pictures docs/overview.svg and docs/techniques/*.svg, one function each. `python docs/generate.py drawings` writes them.

Text and lines have the color of the page's text, and areas have a color that is visible on white and on black. The width is 480, so that
letters of size 13 are legible on a phone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from xml.sax.saxutils import escape

WIDTH, LABEL, ROW, SIZE, LETTER = 480, 68, 24, 13, 0.54
"""The width of a picture and of its row labels, the height of a row, the text size, and the width of a letter of size 1."""
BLUE, GREEN, ORANGE, PURPLE, RED, GRAY = "#3b82f6", "#16a34a", "#ea8a1f", "#a855f7", "#e5484d", "#8b929c"
RANKS = (BLUE, ORANGE, GREEN, PURPLE)
STYLE = "svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6e8eb}}"


@dataclass(frozen=True)
class Span:
    """A box on a row of a timeline; start and length are in units of its scale."""

    start: float
    length: float
    text: str
    color: str


@dataclass
class Drawing:
    """A picture; each method adds an element."""

    title: str
    height: float = 0
    parts: list[str] = field(default_factory=list)

    def _reach(self, y: float) -> None:
        self.height = max(self.height, y)

    def text(self, x: float, y: float, text: str, anchor: str = "start", size: float = SIZE, bold: bool = False) -> None:
        """Add a line of text; y is its middle."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(f'<text x="{x:g}" y="{y + size * 0.36:g}" font-size="{size:g}" text-anchor="{anchor}"{weight}>{escape(text)}</text>')
        self._reach(y + size)

    def box(self, x: float, y: float, width: float, height: float, text: str = "", color: str = GRAY, size: float = SIZE) -> None:
        """Add a colored area with text in its middle, which is smaller if it does not fit."""
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{color}" '
                          f'fill-opacity=".28" stroke="{color}"/>')  # fmt: skip
        lines = text.split("\n")
        for i, line in enumerate(lines):
            fit = min(size, (width - 3) / (LETTER * max(len(line), 1)))
            if line and fit >= 8.5:
                self.text(x + width / 2, y + height / 2 + (i - (len(lines) - 1) / 2) * 14, line, "middle", round(fit, 1))
        self._reach(y + height + 1)

    def line(self, *points: tuple[float, float], arrow: bool = True, color: str = "currentColor", dashed: bool = False) -> None:
        """Add a line through points, with an arrow at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.3"{dash}/>')
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5 or 1
            dx, dy = (x - x0) / length, (y - y0) / length
            corners = ((x, y), (x - 7 * dx - 3.5 * dy, y - 7 * dy + 3.5 * dx), (x - 7 * dx + 3.5 * dy, y - 7 * dy - 3.5 * dx))
            self.parts.append(f'<polygon points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in corners)}" fill="{color}"/>')

    def circle(self, x: float, y: float, radius: float, text: str = "", color: str = GRAY) -> None:
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}" fill="{color}" fill-opacity=".28" stroke="{color}"/>')
        self.text(x, y, text, "middle")
        self._reach(y + radius + 1)

    def row(self, y: float, label: str, spans: Iterable[Span], unit: float, height: float = ROW - 4) -> None:
        """Add a row of a timeline."""
        self.text(0, y + height / 2, label)
        for span in spans:
            self.box(LABEL + span.start * unit, y, span.length * unit - 1, height, span.text, span.color, 12)

    def legend(self, y: float, **colors: str) -> None:
        """Add a legend: a text, with _ for blanks, and its color."""
        x = 0.0
        for name, color in colors.items():
            name = name.replace("_", " ")
            if x and x + 18 + LETTER * SIZE * len(name) > WIDTH:
                x, y = 0.0, y + 18
            self.box(x, y - 6, 12, 12, color=color)
            self.text(x + 17, y, name)
            x += 17 + LETTER * SIZE * len(name) + 14

    def svg(self, name: str) -> str:
        """Return the file's text."""
        width, height = WIDTH + 4, round(self.height + 4)
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-2 -2 {width} {height}" width="640" height="{round(640 * height / width)}" '
                f'role="img" aria-labelledby="{name}-title" font-family="system-ui, sans-serif" fill="currentColor">')  # fmt: skip
        return "\n".join([head, f'<title id="{name}-title">{escape(self.title)}</title>', f"<style>{STYLE}</style>", *self.parts, "</svg>", ""])


def timeline(drawing: Drawing, y: float, rows: dict[str, Sequence[Span]], unit: float) -> float:
    """Draw rows below each other, and return the y after them."""
    for label, spans in rows.items():
        drawing.row(y, label, spans, unit)
        y += ROW
    return y


def chain(texts: str, color: str, start: float = 0, length: float = 1) -> list[Span]:
    """Return boxes of equal length in sequence."""
    return [Span(start + i * length, length, text, color) for i, text in enumerate(texts.split())]


def data() -> Drawing:
    d = Drawing("Data parallelism: each rank runs forward and backward on its own samples; as backward fills a bucket of gradients, "
                "its all-reduce starts, while backward continues")  # fmt: skip
    computing = [Span(0, 4, "forward", BLUE), *(Span(4 + 2 * i, 2, f"bucket {i + 1}", GREEN) for i in range(3)), Span(12, 2, "step", GRAY)]
    links = [Span(6 + 2 * i, 2 if i < 2 else 1.9, f"sum {i + 1}", ORANGE) for i in range(3)]
    y = timeline(d, 0, {"rank 0": computing, "rank 1": computing, "links": links}, 29)
    d.legend(y + 12, forward=BLUE, backward=GREEN, **{"all-reduce_of_a_finished_bucket": ORANGE})
    return d


def schedule(d: Drawing, y: float, name: str, stages_per_rank: int, unit: float) -> float:
    """Draw the table of a schedule from plait's own code: three ranks, six micro-batches; a backward takes twice as long as a forward."""
    from plait.parallel.pipeline.schedules import build_textbook_table

    table = build_textbook_table(name, 3, 6, stages_per_rank)
    times = {"F": 1 / stages_per_rank, "B": 2 / stages_per_rank, "I": 1 / stages_per_rank, "W": 1 / stages_per_rank}
    colors = {"F": BLUE, "B": GREEN, "I": GREEN, "W": PURPLE}
    order, ends, free, done = table.play_order, list[float](), [0.0] * table.ranks, [0] * table.ranks
    rows: list[list[Span]] = [[] for _ in range(table.ranks)]
    for rank, need in zip(order.ranks, order.needs):
        action = table.rows[rank][done[rank]]
        done[rank] += 1
        start = max(free[rank], ends[need] if need >= 0 else 0.0)
        free[rank] = start + times[action.kind]
        ends.append(free[rank])
        rows[rank].append(Span(start, times[action.kind], str(action.micro), colors[action.kind]))
    idle = 1 - 18 / max(free)
    d.text(0, y + 8, f"{name}: bubble {idle:.0%} of the step", bold=True)
    labels = ("stage " + ", ".join(str(stage) for stage, owner in enumerate(table.owner) if owner == rank) for rank in range(table.ranks))
    return timeline(d, y + 20, dict(zip(labels, rows)), unit) + 8


def pipeline() -> Drawing:
    d = Drawing("Pipeline schedules: which stage runs the forward and backward of which micro-batch, and when")
    y = 0.0
    for name, stages_per_rank in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb", 1)):
        y = schedule(d, y, name, stages_per_rank, (WIDTH - LABEL) / 24)
    d.legend(y + 6, backward=GREEN, **{"forward_of_a_micro-batch": BLUE, "gradients_of_weights": PURPLE})
    return d


def tensor() -> Drawing:
    d = Drawing("Tensor parallelism: a column layer and a row layer are sharded; one sum over the ranks follows. With "
                "sequence_parallel norms are computed on sequence shards. With async_tp matmuls overlap with the gather")  # fmt: skip
    for top, heading, first, last in ((0, "sequence_parallel=false", "all rows", "all-reduce"),
                                      (112, "sequence_parallel=true", "its rows", "reduce-scatter")):  # fmt: skip
        d.text(0, top + 8, heading, bold=True)
        for rank in (0, 1):
            y = top + 24 + 36 * rank
            d.text(0, y + 13, f"rank {rank}")
            boxes = ((54, 64, f"norm\n{first}"), (150, 84, "q, k, v\nits columns"), (248, 76, "attention\nits heads"), (338, 62, "o\nits rows"))
            for x, width, text in boxes:
                d.box(x, y, width, 30, text, GRAY if "norm" in text and first == "all rows" else RANKS[rank], 12)
            for a, b in ((118, 150), (234, 248), (324, 338), (400, 428)):
                d.line((a, y + 15), (b, y + 15))
            d.line((442, y + 15), (476, y + 15))
        d.box(428, top + 24, 14, 66, color=RED)
        d.text(435, top + 100, last, "middle", 12)
        if first != "all rows":
            d.box(128, top + 24, 10, 66, color=RED)
            d.text(133, top + 100, "all-gather", "middle", 12)
    d.text(0, 236, "async_tp=false, then true", bold=True)
    y = timeline(d, 248, {"links ": [Span(0, 4, "all-gather", RED)], "compute ": [Span(4, 6, "q, k, v", BLUE)]}, 41)
    timeline(d, y + 6, {"links": chain("1 2 3", RED, length=1.33), "compute": [Span(0, 1.5, "own", BLUE), *chain("1 2 3", BLUE, 1.5, 1.5)]}, 41)
    return d


def context() -> Drawing:
    d = Drawing("Context parallelism: each rank has two chunks of the sequence, so that work under a causal mask is equal. In a ring, keys and "
                "values pass from rank to rank; with ulysses, ranks exchange sequence shards for heads")  # fmt: skip
    owner, cell = [0, 1, 2, 3, 3, 2, 1, 0], 16
    d.text(0, 8, "zigzag, causal mask", bold=True)
    for query, rank in enumerate(owner):
        for key in range(query + 1):
            d.box(18 + key * cell, 24 + query * cell, cell - 1, cell - 1, color=RANKS[rank])
        d.text(12, 32 + query * cell, str(query), "end", 10)
    d.text(18 + 4 * cell, 166, "keys", "middle", 12)
    d.text(175, 8, "cp_method=ring", bold=True)
    corners = ((195, 55), (285, 55), (285, 130), (195, 130))
    for rank, (x, y) in enumerate(corners):
        d.circle(x, y, 15, str(rank), RANKS[rank])
    for (x, y), (tox, toy) in zip(corners, (*corners[1:], corners[0])):
        dx, dy = (tox > x) - (tox < x), (toy > y) - (toy < y)
        d.line((x + 17 * dx, y + 17 * dy), (tox - 17 * dx, toy - 17 * dy))
    d.text(240, 92, "keys, values", "middle", 12)
    d.text(335, 8, "cp_method=ulysses", bold=True)
    for rank in range(4):
        d.box(340, 32 + 26 * rank, 48, 24, color=RANKS[rank])
        d.box(422 + 13 * rank, 32, 12, 102, color=RANKS[rank])
    d.line((391, 84), (418, 84))
    d.text(364, 146, "sequence", "middle", 12)
    d.text(448, 146, "heads", "middle", 12)
    d.legend(188, **{f"rank_{rank}": color for rank, color in enumerate(RANKS)})
    return d


def expert() -> Drawing:
    d = Drawing("Expert parallelism: a router chooses experts for each token; tokens are sent to the ranks that have these, and results back")
    for rank in (0, 1):
        y = 70 * rank
        d.text(0, y + 22, f"rank {rank}")
        d.box(46, y, 50, 44, "tokens", RANKS[rank])
        d.box(112, y, 50, 44, "router", GRAY)
        d.box(236, y, 68, 44, f"experts\n{2 * rank} and {2 * rank + 1}", RANKS[rank])
        d.box(378, y, 98, 44, "weighted sum\nfor each token", RANKS[rank])
        d.line((96, y + 22), (112, y + 22))
        for other in (0, 1):
            d.line((162, y + 22), (236, 22 + 70 * other), color=RANKS[rank])
            d.line((304, 22 + 70 * other), (378, y + 22), color=RANKS[rank])
    d.text(199, 134, "all-to-all", "middle")
    d.text(341, 134, "all-to-all", "middle")
    return d


def precision() -> Drawing:
    d = Drawing("Number formats: bits of sign, exponent and mantissa of fp32, tf32, bf16, fp16 and fp8")
    for i, (name, exponent, mantissa) in enumerate((("fp32", 8, 23), ("tf32", 8, 10), ("bf16", 8, 7), ("fp16", 5, 10), ("fp8 e4m3", 4, 3))):
        y, unit = 24.0 * i, 12.6
        d.text(0, y + 10, name)
        for x, bits, color in ((0, 1, GRAY), (1, exponent, ORANGE), (1 + exponent, mantissa, BLUE)):
            d.box(LABEL + x * unit, y, bits * unit - 1, 20, str(bits) if bits > 1 else "", color)
    d.legend(136, sign=GRAY, exponent_bits=ORANGE, mantissa_bits=BLUE)
    d.text(0, 160, "matmuls and convolutions: the chosen format", bold=True)
    d.text(0, 178, "weights, gradients, optimizer state: fp32 under every plan", bold=True)
    return d


def threads() -> Drawing:
    d = Drawing("DataParallel in one process: device 0 sends the weights, gathers outputs, computes the loss and the update; the others wait")
    y = timeline(d, 0, {
        "device 0": [Span(0, 2, "weights", ORANGE), Span(2, 3, "forward", BLUE), Span(5, 1.6, "gather", ORANGE), Span(6.6, 1.4, "loss", PURPLE),
                     Span(8, 3, "backward", GREEN), Span(11, 1.6, "gather", ORANGE), Span(12.6, 1.4, "step", GRAY)],
        "device 1": [Span(2, 3, "forward", BLUE), Span(8, 3, "backward", GREEN)],
    }, 29.2)  # fmt: skip
    d.legend(y + 12, copies_between_devices=ORANGE, work_of_device_0_alone=PURPLE)
    return d


def batch_split() -> Drawing:
    d = Drawing("Local batches by speed: if they are equal, the fast rank waits for the slow one; if they follow speed, all ranks finish together")
    d.text(0, 8, "batch_split=equal", bold=True)
    y = timeline(d, 20, {"fast": [Span(0, 4, "32 samples", BLUE), Span(4, 8, "waits", GRAY)], "slow": [Span(0, 12, "32 samples", ORANGE)]}, 33)
    d.text(0, y + 14, "batch_split=3:1", bold=True)
    timeline(d, y + 26, {"fast ": [Span(0, 6, "48 samples", BLUE)], "slow ": [Span(0, 6, "16 samples", ORANGE)]}, 33)
    return d


def accumulate() -> Drawing:
    d = Drawing("Gradient accumulation: three micro-batches in sequence; gradients accumulate, and are summed over ranks in the last backward")
    row = [*(Span(4 * i + 2 * k, 2, f"{'FB'[k]}{i}", (BLUE, GREEN)[k]) for i in range(3) for k in (0, 1)), Span(12, 2, "step", GRAY)]
    y = timeline(d, 0, {"rank 0": row, "rank 1": row, "links": [Span(10.6, 1.4, "sum", ORANGE)]}, 29)
    d.legend(y + 12, forward=BLUE, backward=GREEN, **{"all-reduce": ORANGE})
    return d


def activation_checkpointing() -> Drawing:
    d = Drawing("Activation checkpointing: which activations are stored from forward to backward, and which are recomputed, for three units")
    cases = {  # actions, and the units of activations that are kept after each
        "none": ("F1 F2 F3 B3 B2 B1", (1, 2, 3, 2, 1, 0)),
        "selective": ("F1 F2 F3 r3 B3 r2 B2 r1 B1", (0.5, 1, 1.5, 2, 1, 1.5, 0.5, 1, 0)),
        "full": ("F1 F2 F3 F3 B3 F2 B2 F1 B1", (0.15, 0.3, 0.45, 1.3, 0.3, 1.15, 0.15, 1, 0)),
    }
    for i, (name, (actions, kept)) in enumerate(cases.items()):
        y, x, unit, seen = 92.0 * i, 0.0, 38, set[str]()
        points = [(float(LABEL), y + 78)]
        for action, height in zip(actions.split(), kept):
            length = 0.4 if action[0] == "r" else 1.6 if action[0] == "B" else 1
            color = GREEN if action[0] == "B" else PURPLE if action in seen or action[0] == "r" else BLUE
            seen.add(action)
            d.box(LABEL + x * unit, y, length * unit - 1, 20, action.replace("r", ""), color, 12)
            x += length
            points += [(LABEL + x * unit, y + 78 - 16 * height)]
        d.text(0, y + 10, name)
        path = " ".join(f"{a:g},{b:g}" for a, b in points)
        d.parts.append(f'<polygon points="{path}" fill="{GRAY}" fill-opacity=".3" stroke="{GRAY}"/>')
        d.text(0, y + 70, "memory", size=12)
    d.legend(284, forward=BLUE, computed_again=PURPLE, backward=GREEN, activations_kept=GRAY)
    return d


def compiled() -> Drawing:
    d = Drawing("Regional compilation: under dp, fsdp and pp a block is one graph; under tp and cp graphs end at messages between ranks")
    names = ("norm", "q k v", "attn", "o", "+", "norm", "MLP", "+")
    widths = (48, 48, 48, 36, 26, 48, 60, 26)
    outside = {"dp, fsdp, pp": set[int](), "tp": {1, 3, 6}, "cp": {2}}
    for i, (plan, between) in enumerate(outside.items()):
        y, x = 40.0 * i, 100.0
        d.text(0, y + 12, plan)
        for k, (name, width) in enumerate(zip(names, widths)):
            alone = k in between
            d.box(x, y, width + (1 if not alone else -4), 24, name, ORANGE if alone else BLUE)
            x += width + (0 if not alone and k + 1 not in between else 4)
    d.legend(128, inside_a_graph=BLUE, **{"between_graphs:_ranks_exchange_here": ORANGE})
    return d


def compression() -> Drawing:
    d = Drawing("Gradient compression with error feedback: the residual of a step is added to the gradient of the next")
    for rank in (0, 1):
        y = 74 * rank
        d.text(0, y + 15, f"rank {rank}")
        d.box(54, y, 84, 30, "g + residual", RANKS[rank])
        d.box(172, y, 84, 30, "compressed", RANKS[rank])
        d.line((138, y + 15), (172, y + 15))
        d.line((214, y + 30), (214, y + 48), (96, y + 48), (96, y + 31))
        d.text(155, y + 57, "what rounding lost", "middle", 12)
        d.line((256, y + 15), (300, 52), color=RANKS[rank])
    d.box(300, 32, 56, 40, "sum", RED)
    d.line((356, 52), (382, 52))
    d.box(382, 32, 94, 40, "clip, step", GRAY)
    return d


def fsdp() -> Drawing:
    d = Drawing("Sharded data parallelism: memory of a rank among four under dp and ZeRO stages 1, 2 and 3, with Adam in fp32; "
                "and a step of zero_stage=3, which gathers the parameters of a unit before it runs and sums its gradients into shards")  # fmt: skip
    d.text(0, 8, "memory of one rank of four", bold=True)
    parts = {"parameters": (1.0, BLUE), "gradients": (1.0, GREEN), "optimizer state": (2.0, PURPLE)}
    for i, (name, sharded) in enumerate((("dp=4", 0), ("ZeRO 1", 1), ("ZeRO 2", 2), ("ZeRO 3", 3))):  # the last parts are shards
        spans, start = list[Span](), 0.0
        for left, (part, (size, color)) in zip((3, 2, 1), parts.items()):
            length = size / 4 if left <= sharded else size
            spans.append(Span(start, length, part, color))
            start += length
        d.row(20 + ROW * i, name, spans, (WIDTH - LABEL) / 4)
    d.legend(130, parameters=BLUE, gradients=GREEN, optimizer_state=PURPLE)
    d.text(0, 160, "a step under zero_stage=3, two units", bold=True)
    links = [*(Span(start, 1.5, f"gather {unit}", ORANGE) for unit, start in ((1, 0), (2, 1.5), (1, 5.5))), Span(7.4, 1.6, "sum 2", RED),
             Span(9.8, 1.6, "sum 1", RED)]  # fmt: skip
    computing = [*chain("F1 F2", BLUE, 1.5, 1.8), *chain("B2 B1", GREEN, 5.1, 2.3), Span(11.5, 2.2, "step", GRAY)]
    timeline(d, 172, {"links": links, "compute": computing}, 30)
    return d


def offload() -> Drawing:
    d = Drawing("Offload: the optimizer state is in host memory; gradients travel to the host, which takes the step, and parameters travel back")
    y = timeline(d, 0, {
        "device": [Span(0, 2, "forward", BLUE), Span(2, 3, "backward", GREEN), Span(12, 2, "forward", BLUE)],
        "bus": [Span(5, 2.3, "gradients", ORANGE), Span(9.6, 2.4, "parameters", ORANGE)],
        "host": [Span(7.3, 2.3, "update", PURPLE)],
    }, 29.2)  # fmt: skip
    d.legend(y + 12, copies_over_the_bus=ORANGE, on_the_host=PURPLE)
    return d


def replica_groups() -> Drawing:
    d = Drawing("Replica groups: each group trains by itself, and all synchronize after every fourth step")
    step, sync = 34, 56
    x = float(LABEL)
    for part in range(2):
        for _ in range(4):
            for group in (0, 1):
                d.box(x, 34 * group, step - 2, 24, "step", RANKS[group], 12)
            x += step
        d.box(x + 2, 0, sync - 8, 58, "sync\nevery\n=4" if part == 0 else "sync", RED, 12)
        x += sync
    d.text(0, 12, "group 0")
    d.text(0, 46, "group 1")
    d.text(0, 80, "outer_sync=local: the weights become the mean of the groups' weights")
    d.text(0, 98, "diloco: an outer optimizer steps on how far the weights moved")
    return d


def server() -> Drawing:
    d = Drawing("Asynchronous training: each group takes a portion of samples, sends its gradient to the server and takes the next portion; no "
                "group waits for a slower one within the staleness bound")  # fmt: skip
    unit = 29.0
    fast, slow = [Span(1.5 * i, 1.5, "", BLUE) for i in range(9)], [Span(4.5 * i, 4.5, "", ORANGE) for i in range(3)]
    y = timeline(d, 0, {"server": [Span(4.5 * i, 4.5, f"version {i}", GRAY) for i in range(3)], "group 0": fast, "group 1": slow}, unit)
    for span in (*fast, *slow):
        x, row = LABEL + (span.start + span.length) * unit, 1 if span.color == BLUE else 2
        d.line((x - 3, row * ROW), (x - 3, ROW - 4), color=span.color)
    d.legend(y + 12, portions_of_a_fast_group=BLUE, portions_of_a_slow_group=ORANGE)
    d.text(0, y + 32, "an arrow is a gradient, sent to the server")
    return d


def batch_norm() -> Drawing:
    d = Drawing("Batch normalization over all ranks: each rank sends mean, sum of squared deviations and count; all normalize "
                "with the merged statistics")  # fmt: skip
    for rank, share in enumerate(("5 samples", "3 samples")):
        y = 52 * rank
        d.text(0, y + 18, f"rank {rank}")
        d.box(50, y, 66, 36, share, RANKS[rank])
        d.box(140, y, 100, 36, "mean, deviations,\ncount", RANKS[rank], 12)
        d.box(386, y, 90, 36, "normalize", RANKS[rank])
        d.line((116, y + 18), (140, y + 18))
        d.line((240, y + 18), (270, 44), color=RANKS[rank])
        d.line((356, 44), (386, y + 18))
    d.box(270, 22, 86, 44, "statistics of\nall 8 samples", RED, 12)
    return d


def overview() -> Drawing:
    d = Drawing("A job, written for one device, and a plan, one line, make a split run; plait verify compares it with one device")
    d.box(0, 0, 132, 76, "job.py\nmodel, loss, data,\noptimizer", BLUE)
    d.box(0, 100, 132, 44, "plan\ndp=2 tp=2", ORANGE)
    d.box(196, 0, 108, 50, "one device\nplain PyTorch", GRAY)
    for rank in range(4):
        d.box(196 + 56 * (rank % 2), 76 + 36 * (rank // 2), 52, 32, f"rank {rank}", RANKS[rank])
    d.line((132, 25), (196, 25))
    d.line((132, 60), (164, 60), (164, 100), (196, 100))
    d.line((132, 122), (196, 122))
    d.box(372, 42, 104, 58, "same weights,\nloss, gradients", GREEN)
    d.line((304, 25), (338, 25), (338, 60), (372, 60))
    d.line((304, 110), (338, 110), (338, 84), (372, 84))
    d.text(66, 164, "plait plan chooses", "middle")
    d.text(250, 164, "plait train", "middle")
    d.text(424, 164, "plait verify", "middle")
    return d


def axes() -> Drawing:
    d = Drawing("What a rank has under each axis of size 2, of the batch (samples down, sequence across) and of the model (layers "
                "down, width across)")  # fmt: skip
    whole = (0.0, 0.0, 1.0, 1.0)
    top, bottom, left, right = (0.0, 0.0, 1.0, 0.5), (0.0, 0.5, 1.0, 0.5), (0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 0.5, 1.0)
    cases = (("dp", (top, bottom), (whole, whole)), ("fsdp", (top, bottom), (left, right)), ("tp", (whole, whole), (left, right)),
             ("cp", (left, right), (whole, whole)), ("pp", (whole, whole), (top, bottom)), ("ep", (top, bottom), (left, right)))  # fmt: skip
    notes = {"fsdp": "gathered to compute", "ep": "experts", "tp": "computed in parts", "dp": "replicas", "cp": "replicas", "pp": "stages"}
    for i, (name, batch, model) in enumerate(cases):
        x, y = 164 * (i % 3), 118 * (i // 3)
        d.text(x, y + 8, f"{name}=2", bold=True)
        for row, (label, parts) in enumerate((("batch", batch), ("model", model))):
            d.text(x, y + 36 + 38 * row, label, size=12)
            for rank, (left_, top_, width, height) in enumerate(parts):
                at, side = (x + 46 + 44 * rank, y + 20 + 38 * row), 32
                d.parts.append(f'<rect x="{at[0]}" y="{at[1]}" width="{side}" height="{side}" fill="none" stroke="{GRAY}" stroke-dasharray="2 2"/>')
                d.box(at[0] + left_ * side, at[1] + top_ * side, width * side, height * side, color=RANKS[rank])
        d.text(x, y + 102, notes[name], size=12)
    d.legend(246, rank_0=BLUE, rank_1=ORANGE)
    return d


TECHNIQUES: tuple[Callable[[], Drawing], ...] = (
    pipeline, expert, tensor, context, precision, threads, batch_split, accumulate, activation_checkpointing, compiled, compression, data, fsdp,
    offload, replica_groups, server, batch_norm,
)  # fmt: skip


def drawn(draw: Callable[[], Drawing]) -> str:
    """Return the file of a picture."""
    return draw().svg(draw.__name__)


DRAWINGS = {"overview": partial(drawn, overview), **{f"techniques/{draw.__name__}": partial(drawn, draw) for draw in (axes, *TECHNIQUES)}}
"""The function of each picture, by its path in docs/ without .svg. The picture of a technique has the name of its page."""
