"""Checkpoints: a directory of safetensors and a JSON manifest, published by one rename, every byte under a digest.

    checkpoints/step-000200/manifest.json               what is inside and where, sealed; sizes and digests of the files
    checkpoints/step-000200/model-00000.safetensors     the pieces of parameters and buffers that rank 0 wrote
    checkpoints/step-000200/optimizer-00000.safetensors
    checkpoints/step-000300.tmp-5f0c61d2/               being written, or left by a killed save: never read

Every rank writes and reads its own pieces (`checkpoint/safetensors_file.py`), so a checkpoint of one plan is read under any other. A save
writes beside the old checkpoints and renames last; whatever moment it is killed at, the previous one is whole. A load
believes nothing before its digest: what is damaged is refused by name, on all ranks alike, and the one before is used.
Nothing is pickled, so loading runs no code.
"""

import math
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import structs

from plait.checkpoint import carried_state, fingerprint, optimizer_state, state
from plait.checkpoint.carried_state import Training, exchange_json, problems_in, raise_first
from plait.checkpoint.manifest import MANIFEST, Manifest, damaged, published, read_manifest
from plait.checkpoint.opening import read_base
from plait.checkpoint.reading import Reader
from plait.checkpoint.safetensors_file import Cancelled, Damaged, HeldChunk, assign
from plait.checkpoint.saving import SaveThread, Snapshot, discard, free_bytes, publish, room, write_part
from plait.config.errors import FAILED, PlaitError, Problem, problem_of
from plait.data.batch import is_map
from plait.data.sampling import Sampling
from plait.tensors.norm import several
from plait.tensors.rows import Part


@dataclass
class PendingSave:
    """A save between its copy and its publication."""

    path: Path
    building: Path
    keep: int
    empty: list[HeldChunk]
    errand: SaveThread
    publishing: bool = False


class Checkpoints:
    """The checkpoints in a directory, and the save that is on its way."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.refused: list[Problem] = []
        """Damaged checkpoints that `resume` passed over."""
        self.marked: list[Problem] = []
        """Checkpoints of this run with weights or optimizer state that are not finite, for rank 0 to tell of."""
        self.changed: list[str] = []
        """What differs between the job of the checkpoint that was resumed and this one, a line each."""
        self.carries = False
        """Whether the checkpoint that was resumed holds what the model carries from step to step."""
        self.parent: str | None = None
        self.told: Callable[[Path], None] = lambda path: None
        """Called when a save is published, on all ranks in the same step."""
        self.took = 0.0
        """Seconds of a processor that this rank's part of the last save took beside training."""
        self._damaged: set[Path] = set()
        self._flight: PendingSave | None = None
        self._snapshot = Snapshot()
        self._held: list[list[HeldChunk]] = []
        self._allow = False

    def found(self) -> list[Path]:
        """Published checkpoints, newest first."""
        return published(self.directory)

    @property
    def newest_step(self) -> int:
        """The step of the newest one; 0 when there is none."""
        return next((int(path.name[5:]) for path in self.found()), 0)

    def save(self, training: Training, keep: int, wait: bool = True) -> Path:
        """Save the training's state, and keep the newest `keep` checkpoints; every rank calls it.

        It returns once the state is copied, or with `wait` once the checkpoint is published. A save that is still on
        its way is finished first. K004 on all ranks when any rank could not write.
        """
        self.finish(training)
        path = self.directory / f"step-{training.position.step:06d}"
        parts, values, token, free, carried = self._agree(training, path)
        if token:
            written = carried_state.without_copies(self._held, carried)
            shares = assign(written)
            if (needed := room(shares)) > free:  # a part of it would take the room that metrics and the log still have
                raise PlaitError(_unwritable(path, f"it takes {needed / 2**20:.2f} MiB", free), FAILED)
            rank, rule = training.place.rank, training.rule
            empty = [held for each in written for held in each if not held.bytes and 0 in held.shape]
            tensors = dict(self._snapshot.take(shares[rank], parts))
            building = path.with_name(f"{path.name}.tmp-{token}")
            write = lambda cancelled: write_part(building, rank, tensors, values, cancelled, rule)  # noqa: E731
            errand = SaveThread(self.write(write, building))
            self._flight = PendingSave(path, building, keep, empty, errand)
        if wait:
            self.finish(training)
        return path

    def _agree(
        self, training: Training, path: Path
    ) -> tuple[dict[str, Part], dict[str, Any], str, float, list[dict[str, str]]]:
        """What this rank holds and knows; the save's token ("" when there is nothing to save) and the bytes free there; digests of
        what each rank carries.

        Token and bytes are rank 0's on all ranks. What every rank holds is exchanged when it changed.
        """
        rank, word = training.place.rank, dict[str, Any]()
        parts, values, held = dict[str, Any](), dict[str, Any](), list[HeldChunk]()
        try:
            if not self._held:
                optimizer_state.check(training)
            parts, values = state.parts_of(training), state.values_of(training)
            carried = training.carried.take()
            parts |= carried.parts(rank)
            values["carried"] = carried.told(rank, training.place.world)
            held = state.held_of(parts)
            word["carried"] = carried.digests()
        except PlaitError as error:
            word |= problems_in(error)
        if not self._held or held != self._held[rank]:
            word["held"] = list(map(astuple, held))
        if rank == 0:
            there = path.exists() and path not in self._damaged
            word["token"] = "" if there else secrets.token_hex(4)
            self._tidy()
            word["free"] = free_bytes(self.directory)
        said = exchange_json(training, word)
        raise_first(said)
        known = self._held or [[] for _ in said]
        self._held = [[_held(row) for row in w["held"]] if "held" in w else known[r] for r, w in enumerate(said)]
        digests = [w["carried"] for w in said]
        training.carried.exchanged(digests)
        return parts, values, said[0]["token"], said[0]["free"], digests

    @property
    def stage(self) -> tuple[bool, bool]:
        """Whether a save is on its way, and whether it is being published."""
        return self._flight is not None, self._flight is not None and self._flight.publishing

    def word(self, ranks: int) -> float:
        """This rank's part of a sum over ranks: it reaches `ranks` when all have finished, and passes it after a failure."""
        if self._flight is None:
            return 0.0
        return {0: 0.0, 1: 1.0, -1: 2.0 * ranks}[self._flight.errand.state]

    def heard(self, training: Training, total: float) -> None:
        """Told the sum of all ranks' words, go on: publish, finish, or raise K004. All ranks hear the same sum."""
        ranks = training.place.world
        if self._flight is None or total < ranks:
            return
        if total > ranks:
            self._give_up(training, self._flight)
        elif not self._flight.publishing:
            self._flight.publishing, self.took = True, self._flight.errand.took
            if self.publishes(training):
                self._flight.errand = SaveThread(lambda _, flight=self._flight: self.publish(flight, ranks))
        else:
            path, self._flight = self._flight.path, None
            self.parent = path.name
            self.told(path)

    def finish(self, training: Training) -> None:
        """Wait until the save on its way is published; every rank calls it. K004 when it failed."""
        while self._flight is not None:
            self._flight.errand.wait(lambda: training.place.within("checkpoint"))
            total = torch.tensor(self.word(training.place.world), dtype=torch.float64, device=training.rank_model.device)
            if training.rank_model.mesh.everyone is not None:
                dist.all_reduce(total, group=training.rank_model.mesh.everyone)
            self.heard(training, float(total))

    def write(self, work: Callable[[Callable[[], bool]], None], building: Path) -> Callable[[Callable[[], bool]], None]:
        """What the thread of a save does, of which `work` writes this rank's part."""
        return work

    def publishes(self, training: Training) -> bool:
        """Whether this rank has a part in publishing."""
        return training.place.rank == 0

    def publish(self, flight: PendingSave, ranks: int) -> None:
        """Make the save a checkpoint, and remove old ones."""
        wrong = publish(flight.building, flight.path, ranks, self.parent, flight.empty)
        if wrong:
            self.marked.append(unsound(flight.path, wrong))
        self._damaged.discard(flight.path)
        good = [path for path in self.found() if path not in self._damaged]
        last = next((path for path in good if marks(path) == ()), None)
        for old in good[max(1, flight.keep) :]:
            if old != last:
                discard(old)

    def _give_up(self, training: Training, flight: PendingSave) -> None:
        """After a failure anywhere: every rank stops writing, rank 0 clears away, all raise what went wrong."""
        flight.errand.cancel()
        self._flight = None
        error = flight.errand.error
        word = dict[str, Any]()
        if error is not None and not isinstance(error, Cancelled):
            why = str(error) or type(error).__name__
            word["problems"] = [vars(_unwritable(flight.path, why, free_bytes(flight.path.parent)))]
        said = exchange_json(training, word)
        if training.place.rank == 0:
            shutil.rmtree(flight.building, ignore_errors=True)
        raise_first(said, FAILED)

    def _tidy(self) -> None:
        """Remove what killed saves left. Only when none is on its way."""
        for path in (*self.directory.glob("step-*.tmp-*"), *self.directory.glob("step-*.old")):
            shutil.rmtree(path, ignore_errors=True)

    def resume(self, training: Training, missing_ok: bool, allow: bool = False) -> Path | None:
        """Load the newest good checkpoint into the training, one of finite numbers if there is any; every rank calls it.

        K001: there is none; K002: none is good; K003: it is of another job. Those passed over are in `refused`. What the
        job changed is in `changed`; K010 for changes that cannot be meant, unless these are allowed.
        """
        self.finish(training)
        self.changed = []
        self._allow = allow
        self.refused = []
        if training.place.rank == 0:
            self._tidy()
        names = sorted({path.name for path in self.found()}, key=lambda name: -int(name[5:]))
        wrong = {name: marks(self.directory / name) for name in names} if training.place.rank == 0 else {}
        mine = {"found": names, "wrong": wrong, "tensors": list(state.model_parts(training))}
        said = exchange_json(training, mine)
        everyone = {name for word in said for name in word["tensors"]}
        found, wrong = said[0]["found"], said[0]["wrong"]
        for name in sorted(found, key=lambda name: bool(wrong[name])):  # the newest that is sound, then the newest
            path = self.directory / name
            if self._load(training, path, everyone):
                self.parent = name
                self._passed(name, found, wrong)
                return path
            self._damaged.add(path)
        if self.refused:
            raise PlaitError(self.refused)
        if missing_ok:
            return None
        what, why = f"there is no checkpoint in {self.directory}", "nothing was saved yet"
        raise PlaitError(Problem("K001", what, why=why, fix=("start without --resume",)))

    def _passed(self, name: str, newest_first: list[str], wrong: dict[str, Any]) -> None:
        """After loading `name`: newer ones that are not finite are as good as damaged, and will be written anew."""
        if wrong[name]:
            self.marked.append(unsound(self.directory / name, wrong[name]))
            return
        for newer in newest_first[: newest_first.index(name)]:
            if wrong[newer]:
                self.refused.append(unsound(self.directory / newer, wrong[newer]))
                self._damaged.add(self.directory / newer)

    def _load(self, training: Training, path: Path, everyone: set[str]) -> bool:
        """Whether the checkpoint was good and is loaded. All ranks check before any believes; any rank's no is everyone's."""
        word: dict[str, Any] = {}
        manifest, reader, parts, hyper = None, None, dict[str, Any](), list[dict[str, Any]]()
        try:
            manifest = read_manifest(path)
            reader = Reader(path, manifest.files, manifest.tensors)
            for file in list(manifest.files)[training.place.rank :: training.place.world]:
                reader.file(file)
            why = state.mismatch(training, manifest, everyone)
            if why:
                fix = ("resume with the job and the --job arguments it was started with",)
                raise PlaitError(Problem("K003", f"{path} was saved by another job", why=why, fix=fix))
            manifest, hyper, word["changed"] = self._compared(training, manifest)
            parts = state.wanted(training, manifest)
            for name, part in parts.items():
                reader.check(name, part)
        except Damaged as error:
            word["damaged"] = vars(damaged(path, error))
        except PlaitError as error:
            word |= problems_in(error)
        said = exchange_json(training, word)
        wrong = [problem_of(w["damaged"]) for w in said if "damaged" in w]
        if wrong:
            self.refused.append(wrong[0])
            return False
        raise_first(said)
        self.changed = said[0]["changed"]
        assert manifest is not None and reader is not None
        training.base = None
        if manifest.base is not None:
            read_base(training, manifest.base)
        for name, part in parts.items():
            reader.read(name, part)
        lines = state.give(training, manifest, parts, hyper)
        self.carries = bool(manifest.carried.values)
        self.changed = [*self.changed, *lines, *training.callbacks.load_state_dict(structs.asdict(manifest.callbacks))]
        return True

    def _compared(self, training: Training, manifest: Manifest) -> tuple[Manifest, list[dict[str, Any]], list[str]]:
        """What to go on from, with which hyperparameters, and what is to be told of the job's changes. K010, Damaged."""
        now = training.fingerprint
        hyper, lines = fingerprint.hyperparameters(manifest, now)
        why = state.implausible(training, manifest, hyper)
        if why:
            raise Damaged(MANIFEST, why)
        if training.place.rank == 0:
            differences = fingerprint.changes(manifest, training, now)
            fingerprint.refuse(differences, self._allow)
            lines += differences.told
        data = training.data
        at = manifest.position
        if self._allow and is_map(data) and at.start >= len(Sampling.of(training.job, len(data)).epoch(at.epoch)):
            manifest = fingerprint.allowed(manifest)
        return manifest, hyper, lines


def _held(row: list[Any]) -> HeldChunk:
    name, dtype, itemsize, *places = row
    return HeldChunk(name, dtype, itemsize, *map(tuple, places))


def verify(path: Path) -> tuple[Manifest | None, list[Problem]]:
    """The manifest of a checkpoint when it can be read, and every file and tensor of it that is damaged."""
    try:
        manifest = read_manifest(path)
    except Damaged as error:
        return None, [damaged(path, error)]
    reader, problems = Reader(path, manifest.files, manifest.tensors), dict[str, Problem]()
    steps = [lambda file=file: reader.file(file) for file in manifest.files]
    steps += [lambda n=n, p=p: reader.check_piece(n, p) for n, e in manifest.tensors.items() for p in e.pieces]
    for step in steps:
        try:
            step()
        except Damaged as error:
            problem = damaged(path, error)
            problems.setdefault(str(problem), problem)
    return manifest, list(problems.values())


def marks(path: Path) -> tuple[str, ...] | None:
    """What of a checkpoint is not finite, as its manifest says. None: it cannot be read."""
    try:
        return read_manifest(path).nonfinite
    except Damaged:
        return None


def unsound(path: Path, wrong: Sequence[str]) -> Problem:
    """N004 of a checkpoint in which these are not finite."""
    what = f"{path} holds numbers that are not finite"
    why = f"NaN or infinity in {len(wrong)} tensors: {several(wrong)}"
    fix = ("--resume takes the newest checkpoint without any, which is never deleted",)
    return Problem("N004", what, why=why, fix=fix)


def _unwritable(path: Path, why: str, free: float) -> Problem:
    if free < math.inf:
        why += f"; {free / 2**20:.2f} MiB are free there"
    fix = ("make room, then --resume: earlier checkpoints are untouched",)
    return Problem("K004", f"the checkpoint {path} could not be written", why=why, fix=fix)
