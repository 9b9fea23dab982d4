"""Reading parts of tensors out of a directory of safetensors files: any layout into any other.

A rank opens the files it needs, hashes the pieces that overlap its own parts, and copies the overlaps. It never holds
more than its parts: files are mapped, not loaded.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
import torch

from plait.checkpoint.manifest import MANIFEST, Entry, ListedFile, SavedNumber, StoredChunk, read_manifest
from plait.checkpoint.safetensors_file import DTYPES, Damaged, Rect, ShardFile, overlap
from plait.tensors.rows import Part, whole


def room_for(name: str, entry: Entry, shape: tuple[int, ...], like: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a tensor that a file says exists. Damaged when this machine has not so much."""
    size = torch.Size(shape).numel() * like.itemsize
    if size <= psutil.virtual_memory().total:
        try:
            return torch.empty(shape, dtype=like, device=device)
        except (RuntimeError, MemoryError):
            pass
    file = entry.pieces[0].file if entry.pieces else MANIFEST
    raise Damaged(file, f"{name} would take {size / 2**30:.3g} GiB of memory, more than there is")


def rectangle(t: torch.Tensor, start: Sequence[int], rect: Rect) -> torch.Tensor:
    """The view of a rectangle of a tensor of which `t`, which begins at `start`, has all of it."""
    for dim, (first, length) in enumerate(zip(*rect)):
        t = t.narrow(dim, first - start[dim], length)
    return t


class Reader:
    """The files of one checkpoint. `files` says what each is like; None for foreign files, of which nothing is said."""

    def __init__(self, folder: Path, files: dict[str, ListedFile] | None, entries: dict[str, Entry]):
        self.folder, self.files, self.entries = folder, files, entries
        self._open: dict[str, ShardFile] = {}
        self._checked: set[tuple[str, str]] = set()
        self._listed: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        for entry in entries.values():
            for piece in entry.pieces:
                self._listed.setdefault(piece.file, {})[piece.key] = entry.dtype, piece.size

    def file(self, name: str) -> ShardFile:
        """The opened file, its size, header and list of tensors checked."""
        if name not in self._open:
            listed = self.files[name] if self.files is not None else None
            file = ShardFile(self.folder / name) if listed is None else ShardFile(self.folder / name, listed.bytes, listed.header)
            if self.files is not None:
                self._same_tensors(file)
            self._open[name] = file
        return self._open[name]

    def _same_tensors(self, file: ShardFile) -> None:
        listed = self._listed.get(file.name, {})
        actual = {key: (stored.dtype, stored.shape) for key, stored in file.tensors.items()}
        if listed != actual:
            wrong = sorted(key for key in listed.keys() | actual.keys() if listed.get(key) != actual.get(key))
            raise Damaged(file.name, f"{wrong[0]} is not what the manifest says it is")

    def check(self, name: str, part: Part) -> None:
        """Hash every piece of the tensor that overlaps the part. Damaged names the file and the tensor."""
        for piece, _, _ in self._overlaps(name, part):
            self.check_piece(name, piece)

    def check_piece(self, name: str, piece: StoredChunk) -> None:
        """Hash one piece, once."""
        file = self.file(piece.file)
        if piece.sha256 is None or (piece.file, piece.key) in self._checked:
            return
        if file.sha256(piece.key) != piece.sha256:
            raise Damaged(piece.file, f"the bytes of {name} are not those that were saved (SHA-256 differs)")
        self._checked.add((piece.file, piece.key))

    def read(self, name: str, part: Part) -> None:
        """Copy the part of the tensor out of its pieces, into the part's own storage."""
        with torch.no_grad():
            for piece, mine, shared in self._overlaps(name, part):
                source = rectangle(self.file(piece.file).tensor(piece.key), piece.start, shared)
                rectangle(mine.tensor, mine.start, shared).copy_(source)

    def _overlaps(self, name: str, part: Part) -> Iterable[tuple[StoredChunk, Part, Rect]]:
        """Pieces of the files, rectangles of the part, and what the two share."""
        for mine in part.pieces():
            for piece in self.entries[name].pieces:
                shared = overlap((mine.start, tuple(mine.tensor.shape)), piece.rect)
                if shared is not None:
                    yield piece, mine, shared

    def whole(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """All of a tensor, checked, in a CPU tensor of its own."""
        entry = self.entries[name]
        for piece in entry.pieces:
            self.file(piece.file)
        full = room_for(name, entry, entry.shape, dtype or DTYPES[entry.dtype], torch.device("cpu"))
        part = whole(full)
        self.check(name, part)
        self.read(name, part)
        return full


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name (`model/…`, `optimizer/…`), and the optimizer's numbers; every byte is checked."""
    manifest = read_manifest(path)
    reader = Reader(path, manifest.files, manifest.tensors)
    for name in manifest.files:
        reader.file(name)
    found = {name: reader.whole(name) for name in manifest.tensors}
    scalars = {name: v.value if isinstance(v, SavedNumber) else v for name, v in manifest.optimizer.scalars.items()}
    return found | {name: torch.tensor(v) for name, v in scalars.items() if isinstance(v, (int, float))}
