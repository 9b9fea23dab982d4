"""Which run `--resume` means, where a run goes on, and run directories that came to nothing.

A run goes on in its own directory from its newest checkpoint. From an older one, or one that lies elsewhere, a new run
starts, with links to that checkpoint's files and a copy of the record up to it: what came later is left as it is.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from plait.checkpoint.checkpoints import Checkpoints
from plait.checkpoint.manifest import MANIFEST, damaged, read_manifest
from plait.checkpoint.safetensors_file import Damaged
from plait.config.errors import NO_ROOM, USAGE, PlaitError, Problem, did_you_mean
from plait.config.plan import Plan
from plait.engine.run_directory import RunDirectory

STACKS = (b"Traceback (most recent call last)", b"(most recent call first)", b"Fatal Python error")
"""What is worth keeping of the output of a run that failed at its start."""
FAILED_START = "failed-start"
BEST = "best"
"""The folder of a run in which the best checkpoints are (`plait.BestCheckpoint`)."""
AUTO = "auto"
"""`--resume auto`: the job's newest run, or a new one where there is none yet. For a command that is started again by itself."""


def find(text: str, job: str, root: Path) -> tuple[RunDirectory | None, Path | None]:
    """The run that `--resume TEXT` means, and the checkpoint when it names one. K001 when there is none.

    Without a text: the newest run of the job that has a checkpoint.
    """
    if not text:
        return RunDirectory.latest(job, root), None
    path = next((p for p in (Path(text), root / text) if _exists(p)), None)
    if path is None:
        raise PlaitError(_nowhere(text, root))
    path = path.resolve() if path.is_symlink() else path
    path = path.parent if path.name == "checkpoints" else path
    if re.fullmatch(r"step-\d+", path.name) and path.is_dir():
        run = path.parent.parent
        ours = path.parent.name in ("checkpoints", BEST) and (run / "job.json").exists()
        return (RunDirectory(run) if ours else None), path
    if (path / "checkpoints").is_dir():
        if not Checkpoints(path / "checkpoints").found():
            why, fix = "nothing was saved before it ended", ("start without --resume",)
            raise PlaitError(Problem("K001", f"the run {path} has no checkpoint", why=why, fix=fix))
        return RunDirectory(path), None
    if path.name == BEST and (found := Checkpoints(path).found()):
        return find(str(found[0]), job, root)
    why = "a run has a folder `checkpoints`, and a checkpoint is a folder such as step-000200 in it"
    raise PlaitError(Problem("K001", f"{text} is neither a run nor a checkpoint", why=why, fix=("--resume",)))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _nowhere(text: str, root: Path) -> Problem:
    wanted, step = Path(text), re.fullmatch(r"step-\d+", Path(text).name)
    here = next((p.parent for p in (wanted, root / wanted) if step and _exists(p.parent)), None)
    if here is not None:
        names = [p.name for p in Checkpoints(here).found()]
        have = f"there are {', '.join(reversed(names))}" if names else "there are none"
        return Problem("K001", f"there is no checkpoint {wanted.name} in {here}", why=have, fix=("--resume",))
    with suppress(OSError):
        runs = sorted(p.name for p in root.iterdir() if (p / "checkpoints").is_dir() and not p.is_symlink())
        if runs:
            what = f"there is no run {wanted.name[:60]}        {did_you_mean(wanted.name[:60], runs)[:300]}"
            return Problem("K001", what, why=f"looked in {root}/", fix=("--resume    the newest run",))
    return Problem("K001", f"there is no run {text[:60]}", why=f"{root}/ has none", fix=("start without --resume",))


@dataclass
class Start:
    """A run as it was when it was started or resumed."""

    run: RunDirectory
    created: bool
    latest: str | None
    """Where `latest` pointed to before."""
    note: str = ""
    before: tuple[object, ...] = ()

    @staticmethod
    def of(job: str, plan: Plan, arguments: dict[str, str], root: Path, resume: str | None) -> "Start":
        """A new run, or the one that is resumed. K001, K002, R002, R007."""
        if resume is None or (resume == AUTO and not RunDirectory.all(job, root)):
            latest = _latest(root)
            return Start(RunDirectory.create(job, plan, arguments, root), True, latest).seen()
        run, checkpoint = find("" if resume == AUTO else resume, job, root)
        newest = Checkpoints(run.checkpoints).found()[:1] if run is not None else []
        if run is not None and (checkpoint is None or any(path.samefile(checkpoint) for path in newest)):
            latest = _latest(run.path.parent)
            run.point()
            return Start(run, False, latest).seen()
        assert checkpoint is not None
        latest, made = _latest(root), None
        try:
            names = [MANIFEST, *read_manifest(checkpoint).files]
            made = RunDirectory.create(job, plan, arguments, root)
            _copied(checkpoint, names, run, made)
        except Damaged as error:
            raise PlaitError(damaged(checkpoint, error)) from None
        except OSError as error:
            if made is not None:
                Start(made, True, latest).remove()
            if error.errno in NO_ROOM:
                raise
            raise PlaitError(unwritable(made.path if made else root, error)) from None
        why = f": {run.path} has later ones, which stay" if run is not None else ""
        return Start(made, True, latest, f"{made.path} starts from {checkpoint}{why}").seen()

    def seen(self) -> "Start":
        """Remember what the run holds now."""
        self.before = self._held()
        return self

    def _held(self) -> tuple[object, ...]:
        rows = [p.stat().st_size for p in (self.run.metrics, *sorted(self.run.path.glob("events/*"))) if p.exists()]
        return [n for n in rows if n], sorted(p.name for p in self.run.checkpoints.glob("step-*"))

    def failed(self, error: BaseException) -> str:
        """After a failure: a new run that made no step is removed. What is to be said.

        Stacks in its logs are kept, those of the last start that failed, in one folder beside the runs.
        """
        with suppress(OSError):
            if self._held() != self.before:
                return ""
            self._point_back()
            if not self.created:
                return ""
            refused = isinstance(error, PlaitError) and error.exit_code == USAGE
            kept = None if refused or not self._stacks() else self.run.path.parent / FAILED_START
            if kept is not None:
                shutil.rmtree(kept, ignore_errors=True)
                os.rename(self.run.path / "logs", kept)
            self.remove()
            return f"the ranks' output is in {kept}" if kept is not None else ""
        return ""

    def _stacks(self) -> bool:
        return any(word in path.read_bytes()[-(1 << 20) :] for path in self.run.path.glob("logs/*") for word in STACKS)

    def remove(self) -> None:
        self._point_back()
        shutil.rmtree(self.run.path, ignore_errors=True)

    def _point_back(self) -> None:
        """`latest` to where it was, unless another run was started since."""
        link = self.run.path.parent / "latest"
        if _latest(link.parent) != self.run.path.name:
            return
        if self.latest is not None and (link.parent / self.latest).exists():
            RunDirectory(link.parent / self.latest).point()
        elif self.created:
            link.unlink(missing_ok=True)


def _latest(root: Path) -> str | None:
    try:
        return os.readlink(root / "latest")
    except OSError:
        return None


def _copied(checkpoint: Path, names: list[str], run: RunDirectory | None, made: RunDirectory) -> None:
    """The checkpoint in a new run, and the record of the run it is of; later rows are cut when it is loaded."""
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


def unwritable(path: Path, error: OSError) -> Problem:
    """R007 of what could not be written in a run directory."""
    where = str(error.filename or "")
    fix = ("is it yours, and writable?", "--runs somewhere/else    for a new run")
    return Problem("R007", f"the run {path} cannot be written", why=error.strerror or str(error), where=where, fix=fix)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """R007 for what cannot be written there; a full disk is told as such."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        raise PlaitError(unwritable(path, error)) from None
