"""The probes of `verify`: what each side did, and how far apart they are.

A relative difference is taken to the scale of the tensor, or of its neighbourhood when the tensor is truly zero (the
gradient of an attention's key bias is): rounding of neighbours is all that such a tensor holds.

Processes of a proof leave what they computed in files of tensors by name. Complex tensors are stored as real pairs.
"""

import math
from collections.abc import Callable, Container
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.launch import fork
from plait.launch.place import Place

_COMPLEX = " (real and imaginary)"


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors into a safetensors file."""
    plain = {name: t.detach().cpu().resolve_conj() for name, t in tensors.items()}
    real = {n + _COMPLEX * t.is_complex(): torch.view_as_real(t) if t.is_complex() else t for n, t in plain.items()}
    save_file({name: t.contiguous().clone() for name, t in real.items()}, path)


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that `write` wrote.

    Pairs are copied: tensors of a file begin at multiples of 8 bytes, and functions of complex128 end the process at such addresses.
    """
    stored = load_file(path)
    return {
        n.removesuffix(_COMPLEX): torch.view_as_complex(t.clone()) if n.endswith(_COMPLEX) else t
        for n, t in stored.items()
    }


TOLERANCE = 1e-9
"""Numbers of two runs in float64 that differ by more of their size are not the same training."""
FLOOR = 1e-5
"""A gradient that is truly zero is judged beside the largest of its step, at this share of it."""


@dataclass(frozen=True)
class Trace:
    """What one side did: tensors by name, and facts (rows per step, ids, ...)."""

    facts: dict[str, Any]
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    average: dict[str, Tensor] = field(default_factory=dict)
    """Of the weights, where the job wants one (`Job.ema`)."""
    own_gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step of the job's own size, and weights after the last (`proof/own_batch.py`)."""
    own_weights: dict[str, Tensor] = field(default_factory=dict)
    formats_start: dict[str, Tensor] = field(default_factory=dict)
    """Of the step in the plan's own number formats (`proof/formats.py`)."""
    formats_gradient: dict[str, Tensor] = field(default_factory=dict)
    formats_weight: dict[str, Tensor] = field(default_factory=dict)
    formats_state: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of_process(
        folder: Path, work: Callable[[Place], dict[str, Any]], name: str = "", concurrently: Callable[[Place], dict[str, Any]] | None = None
    ) -> "Trace":
        """What `work` returns, done in a process of its own (`name`, for messages), which leaves the tensors in `folder`.

        `concurrently` is the work of a second process meanwhile.
        """

        def side(place: Place) -> dict[str, Any]:
            out = work(place)
            folder.mkdir(exist_ok=True)  # of a process that failed after it: all its tensors are written again
            for group in TENSORS:
                write(folder / f"{group}.safetensors", out.pop(group, {}))
            return out

        names = ({0: name} if name else {}) | {1: "the process that analyses the model"}
        works = (side,) if concurrently is None else (side, concurrently)
        target = lambda place: works[place.rank](replace(place, rank=0, world=1))  # noqa: E731
        facts, *_ = fork.run(target, len(works), fork.Listener(names=names), alike=False)
        return Trace(facts, **{group: read(folder / f"{group}.safetensors") for group in TENSORS})


TENSORS = tuple(each.name for each in fields(Trace) if each.name != "facts")
"""What is compared tensor by tensor: in the small batches, in those of the job's own size, and in the step in own formats."""
OWN_SIZE, OWN_FORMATS = (tuple(n for n in TENSORS if n.startswith(f"{part}_")) for part in ("own", "formats"))
SMALL = tuple(n for n in TENSORS if n not in (*OWN_SIZE, *OWN_FORMATS))


@dataclass(frozen=True)
class Probe:
    """One comparison. `worst` is the largest relative difference, or the number of differences for exact probes."""

    code: str
    title: str
    worst: float = 0.0
    tolerance: float = TOLERANCE
    name: str = ""
    """The first wrong tensor in the model's order, else the worst one."""
    detail: str = ""

    @property
    def equal(self) -> bool:
        return self.worst <= self.tolerance


def as_double(t: Tensor) -> Tensor:
    """The values of a tensor of any format in float64, bools as 0 and 1; a complex one gets a last dim of two."""
    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).double()


def is_discrete(t: Tensor) -> bool:
    """Whether a tensor holds integers or bools, which do not round."""
    return not (t.is_floating_point() or t.is_complex())


def size_of(t: Tensor, floor: float = 0.0) -> float:
    """What differences from a tensor are relative to: its largest number, or `floor` where that is larger."""
    return max(float(t.abs().max()) if t.numel() else 0.0, floor, 1e-300)


def apart(a: Tensor, b: Tensor, scale: float) -> float:
    """The largest difference of two tensors of one shape, relative to `scale`; infinite where one is not a number."""
    difference = float((a - b).abs().max()) / scale if a.numel() else 0.0
    return difference if difference == difference else math.inf


def off(expected: float, actual: float) -> float:
    """The relative difference of two numbers; infinite where it is not a number."""
    difference = abs(expected - actual) / max(abs(expected), 1e-300)
    return difference if difference == difference else math.inf


def ratio(expected: Tensor, actual: Tensor) -> float | None:
    """actual / expected where it is one number on every element that is not noise, else None."""
    expected, actual = as_double(expected), as_double(actual)
    if not expected.numel():
        return None
    big = expected.abs() > 1e-3 * expected.abs().max()
    if not bool(big.any()):
        return None
    ratios = actual[big] / expected[big]
    middle = float(ratios.median())
    return middle if float((ratios - middle).abs().max()) < 1e-6 * max(1.0, abs(middle)) else None


def floor_of(tensors: dict[str, Tensor]) -> float:
    """The least scale of a tensor: a gradient that is truly zero is compared with its neighbourhood."""
    return FLOOR * max(
        (float(t.abs().max()) for t in tensors.values() if t.numel() and not is_discrete(t)), default=0.0
    )


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """The largest movement of any weight: an update is judged beside the weight it changes and beside the others' updates."""
    pairs = ((as_double(after[n]), as_double(t)) for n, t in before.items() if t.numel() and not is_discrete(t))
    return max((float((new - old).abs().max()) for new, old in pairs), default=0.0)


def tensors(
    code: str, title: str, expected: dict[str, Tensor], actual: dict[str, Tensor], names: list[str], floor: float
) -> Probe:
    """Compare tensors by name, relative to their scale or `floor`; the first wrong in the order of `names` is named."""
    missing = sorted(set(expected) ^ set(actual))
    if missing:
        where = "the split run" if missing[0] in expected else "one device"
        return Probe(code, title, math.inf, name=missing[0], detail=f"it is missing in {where}")
    differences = {}
    for name in names:
        if name in expected:
            differences[name] = _difference(expected[name], actual[name], floor)
    if not differences:
        return Probe(code, title)
    worst = max(differences.values())
    first_wrong = next((n for n in names if differences.get(n, 0.0) > TOLERANCE), None)
    name = first_wrong or max(differences, key=lambda n: differences[n])
    return Probe(code, title, worst, name=name, detail=_ratio_text(expected[name], actual[name]) if first_wrong else "")


def _difference(expected: Tensor, actual: Tensor, floor: float) -> float:
    """The largest difference relative to the scale of `expected` or to `floor`. Integers and bools must be equal."""
    if expected.shape != actual.shape:
        return math.inf
    a, b = as_double(expected), as_double(actual)
    if is_discrete(expected):
        return 0.0 if torch.equal(expected, actual) else max(apart(a, b, size_of(a)), 1.0)
    return apart(a, b, size_of(a, floor))


def _ratio_text(expected: Tensor, actual: Tensor) -> str:
    constant = ratio(expected, actual) if expected.shape == actual.shape else None
    return f"ratio {constant:.4g} on every element" if constant is not None else "no constant ratio"


def rows(
    code: str, title: str, expected: list[dict[str, float]], actual: list[dict[str, float]], keys: tuple[str, ...]
) -> Probe:
    """Compare numbers of every step; the first that is wrong is named, else the worst."""
    worst, name = 0.0, ""
    for step, (a, b) in enumerate(zip(expected, actual), 1):
        for key in keys:
            difference = off(a[key], b[key])
            if difference > worst:
                worst, name = difference, f"{key}, step {step}"
            if difference > TOLERANCE:
                return Probe(code, title, worst, name=name, detail=f"{b[key]:.6g} instead of {a[key]:.6g}")
    return Probe(code, title, worst, name=name)


def logged(expected: list[dict[str, Any]], actual: list[dict[str, Any]]) -> Probe:
    """Compare what the job logged in every step, relative to the largest value of a name."""
    title, worst, where = "logged values, every step", 0.0, ""
    pairs = [(a.get("logged", {}), b.get("logged", {})) for a, b in zip(expected, actual)]
    scales = {name: max(abs(a.get(name, 0.0)) for a, _ in pairs) or 1.0 for a, _ in pairs for name in a}
    for step, (a, b) in enumerate(pairs, 1):
        if missing := sorted(a.keys() ^ b.keys()):
            side = "the split run" if missing[0] in a else "one device"
            return Probe("L", title, math.inf, name=f"{missing[0]}, step {step}", detail=f"it is missing in {side}")
        for name in a:
            same = a[name] == b[name] or (a[name] != a[name] and b[name] != b[name])
            difference = 0.0 if same else abs(a[name] - b[name]) / scales[name]
            difference = difference if difference == difference else math.inf
            if difference > worst:
                worst, where = difference, f"{name}, step {step}"
            if difference > TOLERANCE:
                return Probe("L", title, worst, name=where, detail=f"{b[name]:.6g} instead of {a[name]:.6g}")
    return Probe("L", title, worst, name=where)


def replicas(code: str, title: str, steps: list[list[list[Any]]]) -> Probe:
    """Whether what ranks should hold alike was bit-equal on all, after every step. `steps`: of each rank, [what, digests by name] before
    and after every update."""
    first, drifted = dict[tuple[int, str], int](), list[tuple[int, str, str]]()
    for rows in steps:
        for i, (what, digest) in enumerate(rows):
            for key, value in digest.items():
                if first.setdefault((i, key), value) != value:
                    drifted.append((i // 2 + 1, what, key.partition(" @")[0]))
    if not drifted:
        return Probe(code, title, tolerance=0)
    step, what, name = min(drifted, key=lambda row: row[0])
    return Probe(code, title, len(drifted), 0, name, f"its {what} differs between ranks from step {step}")


def unlike_replicas(probe: Probe, buffers: Container[str]) -> tuple[str, str]:
    """(code, sentence) where what ranks should hold alike is not."""
    if probe.name in buffers:
        return "V011", f"buffer {probe.name} is another on some ranks, from step {probe.detail.rpartition(' ')[2]}"
    return "V004", f"{probe.name}: {probe.detail}; it is updated or reduced on some ranks only"


def samples(expected: Trace, ranks: list[dict[str, Any]]) -> Probe:
    """Whether the ranks together saw the samples of the reference, in its order and with its content."""
    for step, (epoch, ids) in enumerate(expected.facts["ids"]):
        given = [i for r in ranks if r["reads"] for i in r["ids"][step][1]]
        if given != ids or any(r["ids"][step][0] != epoch for r in ranks):
            repeated = len(given) - len(set(given))
            detail = f"step {step + 1}: {len(given)} samples instead of {len(ids)}, {repeated} repeated, {len(set(ids) - set(given))} missing"
            return Probe("D", "samples", 1, 0, f"step {step + 1}", detail)
    last = {i: step for step, (_, ids) in enumerate(expected.facts["ids"]) for i in ids}
    for r in ranks:
        mine = {i: step for step, (_, ids) in enumerate(r["ids"]) for i in ids}
        for i in (i for i, step in mine.items() if step == last.get(i)):
            if r["seen"].get(str(i)) != expected.facts["seen"].get(str(i)):
                detail = "its content differs: augmentation is not keyed by (seed, epoch, sample)"
                return Probe("D", "samples", 1, 0, f"sample {i}", detail)
    return Probe("D", "samples", tolerance=0)


def collectives(ranks: list[dict[str, Any]], dry: list[dict[str, Any]] | str) -> Probe:
    """Whether ranks that are alike made the same calls, and every rank as many, of as many bytes, as in a dry run.

    `dry`: what each rank sent in one (`first_step` of `planner/dryrun/dry_run.py`), or why there is none.
    """
    title = "collectives"
    for rank, r in enumerate(ranks):
        first = next(i for i, other in enumerate(ranks) if other["stage"] == r["stage"])
        rows = [_rows(ranks[i], ranks[first]["alike"] == r["alike"]) for i in (first, rank)]
        for k, (a, b) in enumerate(zip(rows[0] + [""], rows[1] + [""])):
            if a != b:
                told = f"rank {first} called {a or 'nothing'}, rank {rank} {b or 'nothing'}"
                return Probe("C", title, 1, 0, f"#{k + 1}", told)
    detail = ", ".join(f"{calls} × {op}" for op, (calls, _) in ranks[0]["sent"].items())
    if any(r["varies"] for r in ranks):
        dry = "what the model runs, and so what its slices send, is drawn at random"
    if isinstance(dry, str):
        return Probe("C", title, tolerance=0, detail=f"{detail}; not compared with a dry run: {dry}")
    for rank, (r, expected) in enumerate(zip(ranks, dry)):
        if expected["sizes"] is not None and list(map(tuple, r["sizes"])) != list(map(tuple, expected["sizes"])):
            continue  # its samples have other sizes than those of the rank that stood for it, or weigh nothing
        for op in {**expected["totals"], **r["sent"]}:
            a, b = (list(side.get(op, (0, 0))) for side in (r["sent"], expected["totals"]))
            if a != b:
                told = f"{a[0]} calls of {a[1]} bytes on rank {rank}, in a dry run {b[0]} of {b[1]}"
                return Probe("C", title, 1, 0, op, told)
    return Probe("C", title, tolerance=0, detail=detail)


def _rows(rank: dict[str, Any], alike: bool) -> list[str]:
    """The calls to compare. What stages send each other depends on how many samples a rank has (`alike`)."""
    if alike:
        return rank["collectives"]
    return [row.partition(" ")[0] for row in rank["collectives"] if not row.startswith(("send", "recv_"))]
