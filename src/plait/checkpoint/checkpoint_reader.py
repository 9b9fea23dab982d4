"""Partial reads of tensors from a directory of safetensors files, from any layout into any other.

A rank opens the files it needs, hashes the pieces that overlap its own parts, and copies the overlaps. Files are memory-mapped, so a rank
needs no more memory than its parts.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
import torch

from plait.checkpoint.manifest import MANIFEST_NAME, ListedFile, SavedNumber, StoredChunk, TensorEntry, read_manifest
from plait.checkpoint.safetensors_file import DTYPES, DamagedFileError, Rect, ShardFile, intersect_rects
from plait.tensors.rows import Part, make_full_part


def allocate_tensor(name: str, entry: TensorEntry, shape: tuple[int, ...], like: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a tensor that a file describes. Raises DamagedFileError if it exceeds this machine's memory."""
    size = torch.Size(shape).numel() * like.itemsize
    if size <= psutil.virtual_memory().total:
        try:
            return torch.empty(shape, dtype=like, device=device)
        except (RuntimeError, MemoryError):
            pass
    file = entry.pieces[0].file if entry.pieces else MANIFEST_NAME
    raise DamagedFileError(file, f"{name} needs {size / 2**30:.3g} GiB of memory, more than this machine has")


def view_rectangle(t: torch.Tensor, start: Sequence[int], rect: Rect) -> torch.Tensor:
    """Return a view of the rectangle `rect` (global coordinates) of `t`, which starts at `start`."""
    for dim, (first, length) in enumerate(zip(*rect)):
        t = t.narrow(dim, first - start[dim], length)
    return t


class CheckpointReader:
    """Files of one checkpoint. `files`: size and header digest of each; None for files of other tools, which have no digests."""

    def __init__(self, folder: Path, files: dict[str, ListedFile] | None, entries: dict[str, TensorEntry]):
        self.folder, self.files, self.entries = folder, files, entries
        self._open: dict[str, ShardFile] = {}
        self._checked: set[tuple[str, str]] = set()
        self._listed: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for entry in entries.values():
            for piece in entry.pieces:
                self._listed.setdefault(piece.file, {})[piece.key] = entry.dtype, piece.size

    def open_file(self, name: str) -> ShardFile:
        """Open a file and check its size, header and tensor list."""
        if name not in self._open:
            listed = self.files[name] if self.files is not None else None
            file = ShardFile(self.folder / name) if listed is None else ShardFile(self.folder / name, listed.bytes, listed.header)
            if self.files is not None:
                self._check_listing(file)
            self._open[name] = file
        return self._open[name]

    def _check_listing(self, file: ShardFile) -> None:
        listed = self._listed.get(file.name, {})
        actual = {key: (stored.dtype, stored.shape) for key, stored in file.tensors.items()}
        if listed != actual:
            wrong = sorted(key for key in listed.keys() | actual.keys() if listed.get(key) != actual.get(key))
            raise DamagedFileError(file.name, f"{wrong[0]} does not match the manifest")

    def check_part(self, name: str, part: Part) -> None:
        """Hash every piece of the tensor that overlaps the part. DamagedFileError names the file and the tensor."""
        for piece, _, _ in self._iter_overlaps(name, part):
            self.check_piece(name, piece)

    def check_piece(self, name: str, piece: StoredChunk) -> None:
        """Hash one piece, once."""
        file = self.open_file(piece.file)
        if piece.sha256 is None or (piece.file, piece.key) in self._checked:
            return
        if file.hash_tensor(piece.key) != piece.sha256:
            raise DamagedFileError(piece.file, f"the bytes of {name} differ from the saved ones (SHA-256)")
        self._checked.add((piece.file, piece.key))

    def read_part(self, name: str, part: Part) -> None:
        """Copy the part of the tensor from its pieces into the part's own storage."""
        with torch.no_grad():
            for piece, mine, shared in self._iter_overlaps(name, part):
                source = view_rectangle(self.open_file(piece.file).read_tensor(piece.key), piece.start, shared)
                view_rectangle(mine.tensor, mine.start, shared).copy_(source)

    def _iter_overlaps(self, name: str, part: Part) -> Iterable[tuple[StoredChunk, Part, Rect]]:
        """Yield (piece of a file, rectangle of the part, their overlap)."""
        for mine in part.iter_rects():
            for piece in self.entries[name].pieces:
                shared = intersect_rects((mine.start, tuple(mine.tensor.shape)), piece.rect)
                if shared is not None:
                    yield piece, mine, shared

    def read_full(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the full tensor on the CPU, with every digest checked."""
        entry = self.entries[name]
        for piece in entry.pieces:
            self.open_file(piece.file)
        full = allocate_tensor(name, entry, entry.shape, dtype or DTYPES[entry.dtype], torch.device("cpu"))
        part = make_full_part(full)
        self.check_part(name, part)
        self.read_part(name, part)
        return full


def read_checkpoint_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint by name (`model/…`, `optimizer/…`), with the optimizer's scalars as tensors. Every digest is checked."""
    manifest = read_manifest(path)
    reader = CheckpointReader(path, manifest.files, manifest.tensors)
    for name in manifest.files:
        reader.open_file(name)
    found = {name: reader.read_full(name) for name in manifest.tensors}
    scalars = {name: v.value if isinstance(v, SavedNumber) else v for name, v in manifest.optimizer.scalars.items()}
    return found | {name: torch.tensor(v) for name, v in scalars.items() if isinstance(v, (int, float))}
