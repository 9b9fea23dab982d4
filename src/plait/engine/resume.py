"""Find the run that `--resume` names and where it restarts, and clean up run directories without any step.

A run resumes in its own directory from its newest checkpoint. From an older checkpoint, or one elsewhere, a new run starts. It has
links to that checkpoint's files and a copy of the record up to it; later data of the old run is unchanged.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from plait.checkpoint.checkpoints import Checkpoints
from plait.checkpoint.manifest import MANIFEST_NAME, damaged_problem, read_manifest
from plait.checkpoint.safetensors_file import DamagedFileError
from plait.config.errors import DISK_FULL_ERRNOS, USAGE, PlaitError, Problem, did_you_mean
from plait.config.plan import Plan
from plait.engine.run_directory import RunDirectory

STACK_MARKERS = (b"Traceback (most recent call last)", b"(most recent call first)", b"Fatal Python error")
"""Stack markers in the output of a run that failed at its start: output with them is kept."""
FAILED_START = "failed-start"
BEST = "best"
"""The folder of a run with the best checkpoints (`plait.BestCheckpoint`)."""
AUTO = "auto"
"""`--resume auto`: the job's newest run, or a new one if there is none. For a command that is restarted automatically."""


def find_run(text: str, job: str, root: Path) -> tuple[RunDirectory | None, Path | None]:
    """Return the run that `--resume TEXT` names, and the checkpoint if it names one. K001 if there is none.

    Without a text: the newest run of the job that has a checkpoint.
    """
    if not text:
        return RunDirectory.find_latest(job, root), None
    path = next((p for p in (Path(text), root / text) if _exists(p)), None)
    if path is None:
        raise PlaitError(_make_missing_problem(text, root))
    path = path.resolve() if path.is_symlink() else path
    path = path.parent if path.name == "checkpoints" else path
    if re.fullmatch(r"step-\d+", path.name) and path.is_dir():
        run = path.parent.parent
        ours = path.parent.name in ("checkpoints", BEST) and (run / "job.json").exists()
        return (RunDirectory(run) if ours else None), path
    if (path / "checkpoints").is_dir():
        if not Checkpoints(path / "checkpoints").list_published():
            why, fix = "it ended before its first checkpoint", ("start without --resume",)
            raise PlaitError(Problem("K001", f"the run {path} has no checkpoint", why=why, fix=fix))
        return RunDirectory(path), None
    if path.name == BEST and (found := Checkpoints(path).list_published()):
        return find_run(str(found[0]), job, root)
    why = "a run has a folder `checkpoints`, and a checkpoint is a folder such as step-000200 in it"
    raise PlaitError(Problem("K001", f"{text} is neither a run nor a checkpoint", why=why, fix=("--resume",)))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # an invalid file name
        return False


def _make_missing_problem(text: str, root: Path) -> Problem:
    wanted, step = Path(text), re.fullmatch(r"step-\d+", Path(text).name)
    here = next((p.parent for p in (wanted, root / wanted) if step and _exists(p.parent)), None)
    if here is not None:
        names = [p.name for p in Checkpoints(here).list_published()]
        have = f"it has {', '.join(reversed(names))}" if names else "it has none"
        return Problem("K001", f"there is no checkpoint {wanted.name} in {here}", why=have, fix=("--resume",))
    with suppress(OSError):
        runs = sorted(p.name for p in root.iterdir() if (p / "checkpoints").is_dir() and not p.is_symlink())
        if runs:
            what = f"there is no run {wanted.name[:60]}        {did_you_mean(wanted.name[:60], runs)[:300]}"
            return Problem("K001", what, why=f"looked in {root}/", fix=("--resume    the newest run",))
    return Problem("K001", f"there is no run {text[:60]}", why=f"{root}/ has none", fix=("start without --resume",))


@dataclass
class RunStart:
    """A run and its state when it was started or resumed."""

    run: RunDirectory
    created: bool
    latest: str | None
    """Previous target of `latest`."""
    note: str = ""
    initial_state: tuple[object, ...] = ()

    @staticmethod
    def create_or_resume(job: str, plan: Plan, arguments: dict[str, str], root: Path, resume: str | None) -> "RunStart":
        """Create a run, or open the one to resume. K001, K002, R002, R007."""
        if resume is None or (resume == AUTO and not RunDirectory.list_runs(job, root)):
            latest = _read_latest(root)
            return RunStart(RunDirectory.create(job, plan, arguments, root), True, latest).mark_state()
        run, checkpoint = find_run("" if resume == AUTO else resume, job, root)
        newest = Checkpoints(run.checkpoints).list_published()[:1] if run is not None else []
        if run is not None and (checkpoint is None or any(path.samefile(checkpoint) for path in newest)):
            latest = _read_latest(run.path.parent)
            run.link_latest()
            return RunStart(run, False, latest).mark_state()
        assert checkpoint is not None
        latest, made = _read_latest(root), None
        try:
            names = [MANIFEST_NAME, *read_manifest(checkpoint).files]
            made = RunDirectory.create(job, plan, arguments, root)
            _copy_checkpoint(checkpoint, names, run, made)
        except DamagedFileError as error:
            raise PlaitError(damaged_problem(checkpoint, error)) from None
        except OSError as error:
            if made is not None:
                RunStart(made, True, latest).remove()
            if error.errno in DISK_FULL_ERRNOS:
                raise
            raise PlaitError(make_unwritable_problem(made.path if made else root, error)) from None
        why = f": {run.path} has later checkpoints, which are kept" if run is not None else ""
        return RunStart(made, True, latest, f"{made.path} starts from {checkpoint}{why}").mark_state()

    def mark_state(self) -> "RunStart":
        """Save the current state of the run for comparison."""
        self.initial_state = self._read_state()
        return self

    def _read_state(self) -> tuple[object, ...]:
        rows = [p.stat().st_size for p in (self.run.metrics, *sorted(self.run.path.glob("events/*"))) if p.exists()]
        return [n for n in rows if n], sorted(p.name for p in self.run.checkpoints.glob("step-*"))

    def handle_failure(self, error: BaseException) -> str:
        """After a failure, remove a new run without any step. Returns a message for the user.

        Logs with stacks are moved to one folder next to the runs, which keeps those of the last failed start.
        """
        with suppress(OSError):
            if self._read_state() != self.initial_state:
                return ""
            self._restore_latest()
            if not self.created:
                return ""
            refused = isinstance(error, PlaitError) and error.exit_code == USAGE
            kept = None if refused or not self._has_stacks() else self.run.path.parent / FAILED_START
            if kept is not None:
                shutil.rmtree(kept, ignore_errors=True)
                os.rename(self.run.path / "logs", kept)
            self.remove()
            return f"the ranks' output is in {kept}" if kept is not None else ""
        return ""

    def _has_stacks(self) -> bool:
        return any(word in path.read_bytes()[-(1 << 20) :] for path in self.run.path.glob("logs/*") for word in STACK_MARKERS)

    def remove(self) -> None:
        self._restore_latest()
        shutil.rmtree(self.run.path, ignore_errors=True)

    def _restore_latest(self) -> None:
        """Restore the previous target of `latest`, unless another run was started since."""
        link = self.run.path.parent / "latest"
        if _read_latest(link.parent) != self.run.path.name:
            return
        if self.latest is not None and (link.parent / self.latest).exists():
            RunDirectory(link.parent / self.latest).link_latest()
        elif self.created:
            link.unlink(missing_ok=True)


def _read_latest(root: Path) -> str | None:
    try:
        return os.readlink(root / "latest")
    except OSError:
        return None


def _copy_checkpoint(checkpoint: Path, names: list[str], run: RunDirectory | None, made: RunDirectory) -> None:
    """Copy the checkpoint and the record of its run into a new run; later rows are truncated when it is loaded."""
    building = made.checkpoints / f"{checkpoint.name}.tmp-copy"
    building.mkdir()
    for name in names:
        try:
            os.link(checkpoint / name, building / name, follow_symlinks=False)
        except OSError:
            shutil.copyfile(checkpoint / name, building / name, follow_symlinks=False)
    os.rename(building, made.checkpoints / checkpoint.name)
    if run is not None:
        for path in filter(Path.is_file, (run.metrics, *run.path.glob("events/*.jsonl"))):
            shutil.copyfile(path, made.path / path.relative_to(run.path))


def make_unwritable_problem(path: Path, error: OSError) -> Problem:
    """Make R007 for a run directory that cannot be written."""
    where = str(error.filename or "")
    fix = ("check its owner and permissions", "--runs somewhere/else    for a new run")
    return Problem("R007", f"the run {path} cannot be written", why=error.strerror or str(error), where=where, fix=fix)


@contextmanager
def translate_write_errors(path: Path) -> Iterator[None]:
    """Convert write errors of the run directory to R007, except a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRNOS:
            raise
        raise PlaitError(make_unwritable_problem(path, error)) from None
