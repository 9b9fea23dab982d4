"""Checkpoints: a directory of safetensors files and a JSON manifest, published by one rename, every byte under a digest.

checkpoints/step-000200/manifest.json               contents and their files, sealed; sizes and digests of the files
checkpoints/step-000200/model-00000.safetensors     the pieces of parameters and buffers that rank 0 wrote
checkpoints/step-000200/optimizer-00000.safetensors
checkpoints/step-000300.tmp-5f0c61d2/               being written, or left by a killed save: never read

Every rank writes and reads its own pieces (`checkpoint/safetensors_file.py`), so a checkpoint of one plan can be loaded under any other.
A save writes to a new directory and renames it last. If it is killed at any moment, the previous checkpoint is intact.
A load checks each digest before use. All ranks reject a damaged checkpoint and load the previous one.
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

from plait.checkpoint import carried_state, fingerprint, optimizer_state, training_state
from plait.checkpoint.carried_state import Training, encode_problems, exchange_json, raise_first_problem
from plait.checkpoint.checkpoint_reader import CheckpointReader
from plait.checkpoint.foreign_weights import read_base
from plait.checkpoint.manifest import MANIFEST_NAME, Manifest, damaged_problem, list_checkpoints, read_manifest
from plait.checkpoint.safetensors_file import DamagedFileError, LocalChunk, WriteCancelled, assign_writers
from plait.checkpoint.saving import (
    HostSnapshot,
    SaveThread,
    delete_directory,
    estimate_bytes,
    measure_free_bytes,
    publish_checkpoint,
    write_part,
)
from plait.config.errors import FAILED, PlaitError, Problem, parse_problem
from plait.data.batch import is_map
from plait.data.sampling import Sampling
from plait.tensors.norm import shorten_names
from plait.tensors.rows import Part


@dataclass
class PendingSave:
    """A save between the snapshot and the publication of its checkpoint."""

    path: Path
    build_dir: Path
    keep: int
    empty_chunks: list[LocalChunk]
    thread: SaveThread
    publishing: bool = False


class Checkpoints:
    """The checkpoints in a directory, and the pending save."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.damaged_found: list[Problem] = []
        """Damaged checkpoints that `resume` skipped."""
        self.nonfinite_found: list[Problem] = []
        """Checkpoints of this run with NaN or infinity in weights or optimizer state, reported by rank 0."""
        self.job_changes: list[str] = []
        """Differences between the job of the loaded checkpoint and this job, a line each."""
        self.has_carried_state = False
        """Whether the loaded checkpoint has carried state of the model."""
        self.parent: str | None = None
        self.on_published: Callable[[Path], None] = lambda path: None
        """Called on all ranks in the step in which a save is published."""
        self.save_seconds = 0.0
        """CPU seconds of this rank's part of the last save, in its background thread."""
        self._damaged: set[Path] = set()
        self._pending: PendingSave | None = None
        self._snapshot = HostSnapshot()
        self._held_chunks: list[list[LocalChunk]] = []
        self._allow = False

    def list_published(self) -> list[Path]:
        """Return the published checkpoints, newest first."""
        return list_checkpoints(self.directory)

    @property
    def newest_step(self) -> int:
        """Step of the newest checkpoint; 0 if there are none."""
        return next((int(path.name[5:]) for path in self.list_published()), 0)

    def save(self, training: Training, keep: int, wait: bool = True) -> Path:
        """Save the training state and keep the newest `keep` checkpoints. Collective.

        It returns once the state is copied, or with `wait` once the checkpoint is published. A pending save is
        finished first. K004 on all ranks if any rank could not write.

        """
        self.finish_save(training)
        path = self.directory / f"step-{training.position.step:06d}"
        parts, values, token, free, carried = self._collect_state(training, path)
        if token:
            written = carried_state.drop_duplicate_chunks(self._held_chunks, carried)
            shares = assign_writers(written)
            if (needed := estimate_bytes(shares)) > free:  # a partial save would use the disk space that metrics and the log need
                raise PlaitError(_unwritable_problem(path, f"it takes {needed / 2**20:.2f} MiB", free), FAILED)
            rank, rule = training.place.rank, training.rule
            empty = [held for each in written for held in each if not held.num_bytes and 0 in held.shape]
            tensors = dict(self._snapshot.copy_chunks(shares[rank], parts))
            building = path.with_name(f"{path.name}.tmp-{token}")
            write = lambda cancelled: write_part(building, rank, tensors, values, cancelled, rule)  # noqa: E731
            errand = SaveThread(self.wrap_writer(write, building))
            self._pending = PendingSave(path, building, keep, empty, errand)
        if wait:
            self.finish_save(training)
        return path

    def _collect_state(
        self, training: Training, path: Path
    ) -> tuple[dict[str, Part], dict[str, Any], str, float, list[dict[str, str]]]:
        """Return this rank's parts and values, the save's token ("" if the checkpoint exists), the free bytes, and all ranks' digests.

        Token and free bytes are rank 0's on all ranks. The lists of chunks are exchanged only if they changed.

        """
        rank, word = training.place.rank, dict[str, Any]()
        parts, values, held = dict[str, Any](), dict[str, Any](), list[LocalChunk]()
        try:
            if not self._held_chunks:
                optimizer_state.check_resumable(training)
            parts, values = training_state.collect_parts(training), training_state.collect_values(training)
            carried = training.carried.snapshot()
            parts |= carried.checkpoint_parts(rank)
            values["carried"] = carried.to_manifest(rank, training.place.world)
            held = training_state.list_local_chunks(parts)
            word["carried"] = carried.compute_digests()
        except PlaitError as error:
            word |= encode_problems(error)
        if not self._held_chunks or held != self._held_chunks[rank]:
            word["held"] = list(map(astuple, held))
        if rank == 0:
            there = path.exists() and path not in self._damaged
            word["token"] = "" if there else secrets.token_hex(4)
            self._remove_leftovers()
            word["free"] = measure_free_bytes(self.directory)
        said = exchange_json(training, word)
        raise_first_problem(said)
        known = self._held_chunks or [[] for _ in said]
        self._held_chunks = [[_decode_chunk(row) for row in w["held"]] if "held" in w else known[r] for r, w in enumerate(said)]
        digests = [w["carried"] for w in said]
        training.carried.note_saved(digests)
        return parts, values, said[0]["token"], said[0]["free"], digests

    @property
    def save_status(self) -> tuple[bool, bool]:
        """(whether a save is pending, whether it is being published)."""
        return self._pending is not None, self._pending is not None and self._pending.publishing

    def progress_value(self, ranks: int) -> float:
        """Return this rank's term of a sum over ranks. The sum is `ranks` if all have finished, and larger after a failure."""
        if self._pending is None:
            return 0.0
        return {0: 0.0, 1: 1.0, -1: 2.0 * ranks}[self._pending.thread.state]

    def advance_save(self, training: Training, total: float) -> None:
        """Publish or finish the pending save, or raise K004, by the sum of all ranks' `progress_value`, which is equal on all ranks."""
        ranks = training.place.world
        if self._pending is None or total < ranks:
            return
        if total > ranks:
            self._abort_save(training, self._pending)
        elif not self._pending.publishing:
            self._pending.publishing, self.save_seconds = True, self._pending.thread.cpu_seconds
            if self.is_publisher(training):
                self._pending.thread = SaveThread(lambda _, flight=self._pending: self.publish_save(flight, ranks))
        else:
            path, self._pending = self._pending.path, None
            self.parent = path.name
            self.on_published(path)

    def finish_save(self, training: Training) -> None:
        """Wait until the pending save is published. Collective. K004 if it failed."""
        while self._pending is not None:
            self._pending.thread.wait(lambda: training.place.set_phase("checkpoint"))
            total = torch.tensor(self.progress_value(training.place.world), dtype=torch.float64, device=training.rank_model.device)
            if training.rank_model.mesh.world_group is not None:
                dist.all_reduce(total, group=training.rank_model.mesh.world_group)
            self.advance_save(training, float(total))

    def wrap_writer(self, work: Callable[[Callable[[], bool]], None], building: Path) -> Callable[[Callable[[], bool]], None]:
        """Return the function that the save's thread runs. `work` writes this rank's part."""
        return work

    def is_publisher(self, training: Training) -> bool:
        """Return whether this rank takes part in publishing."""
        return training.place.rank == 0

    def publish_save(self, flight: PendingSave, ranks: int) -> None:
        """Publish the checkpoint and remove old ones."""
        wrong = publish_checkpoint(flight.build_dir, flight.path, ranks, self.parent, flight.empty_chunks)
        if wrong:
            self.nonfinite_found.append(nonfinite_problem(flight.path, wrong))
        self._damaged.discard(flight.path)
        good = [path for path in self.list_published() if path not in self._damaged]
        last = next((path for path in good if read_nonfinite_names(path) == ()), None)
        for old in good[max(1, flight.keep) :]:
            if old != last:
                delete_directory(old)

    def _abort_save(self, training: Training, flight: PendingSave) -> None:
        """Stop a failed save on all ranks, remove its files on rank 0, and raise the error on all ranks."""
        flight.thread.cancel()
        self._pending = None
        error = flight.thread.error
        word = dict[str, Any]()
        if error is not None and not isinstance(error, WriteCancelled):
            why = str(error) or type(error).__name__
            word["problems"] = [vars(_unwritable_problem(flight.path, why, measure_free_bytes(flight.path.parent)))]
        said = exchange_json(training, word)
        if training.place.rank == 0:
            shutil.rmtree(flight.build_dir, ignore_errors=True)
        raise_first_problem(said, FAILED)

    def _remove_leftovers(self) -> None:
        """Remove the files of killed saves. Requires that no save is pending."""
        for path in (*self.directory.glob("step-*.tmp-*"), *self.directory.glob("step-*.old")):
            shutil.rmtree(path, ignore_errors=True)

    def resume(self, training: Training, missing_ok: bool, allow: bool = False) -> Path | None:
        """Load the newest intact checkpoint, preferring one with finite values. Collective.

        K001: there is none. K002: none is intact. K003: it belongs to another job. Skipped checkpoints are in `damaged_found`.
        Differences of the job are in `job_changes`; K010 for changes that are not allowed.

        """
        self.finish_save(training)
        self.job_changes = []
        self._allow = allow
        self.damaged_found = []
        if training.place.rank == 0:
            self._remove_leftovers()
        names = sorted({path.name for path in self.list_published()}, key=lambda name: -int(name[5:]))
        wrong = {name: read_nonfinite_names(self.directory / name) for name in names} if training.place.rank == 0 else {}
        mine = {"found": names, "wrong": wrong, "tensors": list(training_state.collect_model_parts(training))}
        said = exchange_json(training, mine)
        everyone = {name for word in said for name in word["tensors"]}
        found, wrong = said[0]["found"], said[0]["wrong"]
        for name in sorted(found, key=lambda name: bool(wrong[name])):  # the newest finite one, then the newest
            path = self.directory / name
            if self._load(training, path, everyone):
                self.parent = name
                self._mark_nonfinite_newer(name, found, wrong)
                return path
            self._damaged.add(path)
        if self.damaged_found:
            raise PlaitError(self.damaged_found)
        if missing_ok:
            return None
        what, why = f"there is no checkpoint in {self.directory}", "nothing was saved yet"
        raise PlaitError(Problem("K001", what, why=why, fix=("start without --resume",)))

    def _mark_nonfinite_newer(self, name: str, newest_first: list[str], wrong: dict[str, Any]) -> None:
        """Mark checkpoints newer than `name` that hold NaN or infinity as damaged, so that they are overwritten."""
        if wrong[name]:
            self.nonfinite_found.append(nonfinite_problem(self.directory / name, wrong[name]))
            return
        for newer in newest_first[: newest_first.index(name)]:
            if wrong[newer]:
                self.damaged_found.append(nonfinite_problem(self.directory / newer, wrong[newer]))
                self._damaged.add(self.directory / newer)

    def _load(self, training: Training, path: Path, everyone: set[str]) -> bool:
        """Load a checkpoint. Return False if it is damaged on any rank; all ranks check before any of them loads."""
        word: dict[str, Any] = {}
        manifest, reader, parts, hyper = None, None, dict[str, Any](), list[dict[str, Any]]()
        try:
            manifest = read_manifest(path)
            reader = CheckpointReader(path, manifest.files, manifest.tensors)
            for file in list(manifest.files)[training.place.rank :: training.place.world]:
                reader.open_file(file)
            why = training_state.find_job_mismatch(training, manifest, everyone)
            if why:
                fix = ("resume with the job and the --job arguments it was started with",)
                raise PlaitError(Problem("K003", f"{path} was saved by another job", why=why, fix=fix))
            manifest, hyper, word["changed"] = self._compare_job(training, manifest)
            parts = training_state.allocate_parts(training, manifest)
            for name, part in parts.items():
                reader.check_part(name, part)
        except DamagedFileError as error:
            word["damaged"] = vars(damaged_problem(path, error))
        except PlaitError as error:
            word |= encode_problems(error)
        said = exchange_json(training, word)
        wrong = [parse_problem(w["damaged"]) for w in said if "damaged" in w]
        if wrong:
            self.damaged_found.append(wrong[0])
            return False
        raise_first_problem(said)
        self.job_changes = said[0]["changed"]
        assert manifest is not None and reader is not None
        training.base = None
        if manifest.base is not None:
            read_base(training, manifest.base)
        for name, part in parts.items():
            reader.read_part(name, part)
        lines = training_state.restore_training(training, manifest, parts, hyper)
        self.has_carried_state = bool(manifest.carried.values)
        self.job_changes = [*self.job_changes, *lines, *training.callbacks.load_state_dict(structs.asdict(manifest.callbacks))]
        return True

    def _compare_job(self, training: Training, manifest: Manifest) -> tuple[Manifest, list[dict[str, Any]], list[str]]:
        """Return the manifest to resume from, the hyperparameters, and the job's changes, a line each. K010, DamagedFileError."""
        now = training.fingerprint
        hyper, lines = fingerprint.merge_hyperparameters(manifest, now)
        why = training_state.find_implausible_values(training, manifest, hyper)
        if why:
            raise DamagedFileError(MANIFEST_NAME, why)
        if training.place.rank == 0:
            differences = fingerprint.compare_job(manifest, training, now)
            fingerprint.raise_rejected_changes(differences, self._allow)
            lines += differences.accepted
        data = training.data
        at = manifest.position
        if self._allow and is_map(data) and at.start >= len(Sampling.from_job(training.job, len(data)).epoch_indices(at.epoch)):
            manifest = fingerprint.skip_to_next_epoch(manifest)
        return manifest, hyper, lines


def _decode_chunk(row: list[Any]) -> LocalChunk:
    name, dtype, itemsize, *places = row
    return LocalChunk(name, dtype, itemsize, *map(tuple, places))


def verify_checkpoint(path: Path) -> tuple[Manifest | None, list[Problem]]:
    """Return the manifest of a checkpoint (None if unreadable) and a problem for each damaged file or tensor."""
    try:
        manifest = read_manifest(path)
    except DamagedFileError as error:
        return None, [damaged_problem(path, error)]
    reader, problems = CheckpointReader(path, manifest.files, manifest.tensors), dict[str, Problem]()
    steps = [lambda file=file: reader.open_file(file) for file in manifest.files]
    steps += [lambda n=n, p=p: reader.check_piece(n, p) for n, e in manifest.tensors.items() for p in e.pieces]
    for step in steps:
        try:
            step()
        except DamagedFileError as error:
            problem = damaged_problem(path, error)
            problems.setdefault(str(problem), problem)
    return manifest, list(problems.values())


def read_nonfinite_names(path: Path) -> tuple[str, ...] | None:
    """Return the names of tensors with NaN or infinity that the manifest lists; None if it cannot be read."""
    try:
        return read_manifest(path).nonfinite
    except DamagedFileError:
        return None


def nonfinite_problem(path: Path, wrong: Sequence[str]) -> Problem:
    """N004 for a checkpoint with NaN or infinity in the tensors `wrong`."""
    what = f"{path} holds NaN or infinity"
    why = f"{len(wrong)} of its tensors are not finite: {shorten_names(wrong)}"
    fix = ("--resume    loads the newest finite checkpoint, which is never deleted",)
    return Problem("N004", what, why=why, fix=fix)


def _unwritable_problem(path: Path, why: str, free: float) -> Problem:
    if free < math.inf:
        why += f"; {free / 2**20:.2f} MiB are free there"
    fix = ("free disk space, then --resume (earlier checkpoints are intact)",)
    return Problem("K004", f"the checkpoint {path} could not be written", why=why, fix=fix)
