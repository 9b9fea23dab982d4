"""The base of a fine-tuning: frozen parameters that checkpoints name instead of holding.

A job that trains adapters starts from weights that somebody else keeps. What is frozen and was read from there has the same
numbers at every step, so a checkpoint holds what is trained, the buffers and the optimizer's state, and says of the rest where it
is: the path, a digest of it, and for each parameter its name there. Whoever goes on from the checkpoint reads these parameters
from the base again, if its digest is still the same.

The digest of files is the SHA-256 of their SHA-256s, in the order of their names; each rank hashes its share of them. That of a
checkpoint of plait is the SHA-256 of its manifest, which holds the digests of all its bytes.
"""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from plait.checkpoint.carried_state import Training, exchange_json
from plait.checkpoint.manifest import MANIFEST
from plait.checkpoint.reading import Reader
from plait.checkpoint.safetensors_file import Damaged
from plait.config.files import open_plain
from plait.tensors.rows import Part

BLOCK = 1 << 24
"""Bytes that are hashed at a time."""


class Layered(Reader):
    """A checkpoint and, under it, the base that has the rest of its tensors; entries by the model's names."""

    def __init__(self, top: Reader, under: Reader, sources: dict[str, str]):
        super().__init__(top.folder, top.files, {})
        self.entries = top.entries | {name: under.entries[source] for name, source in sources.items()}
        self.places = {name: (top, name) for name in top.entries}
        self.places |= {name: (under, source) for name, source in sources.items()}

    def check(self, name: str, part: Part) -> None:
        """As of a `Reader`, in the one that has it."""
        reader, stored = self.places[name]
        reader.check(stored, part)

    def read(self, name: str, part: Part) -> None:
        """As of a `Reader`, from the one that has it."""
        reader, stored = self.places[name]
        reader.read(stored, part)

    def whole(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """As of a `Reader`, from the one that has it."""
        reader, stored = self.places[name]
        return reader.whole(stored, dtype)


def digest_of(reader: Reader, training: Training | None = None) -> str:
    """The digest of weights. With a training all its ranks call it, and each hashes its share of the files."""
    if reader.files is not None:
        return _sha256(reader.folder / MANIFEST)
    names = sorted({piece.file for entry in reader.entries.values() for piece in entry.pieces})
    rank, world = (0, 1) if training is None else (training.place.rank, training.place.world)
    mine = dict[str, str]()
    for name in names[rank::world]:
        try:
            mine[name] = _sha256(reader.folder / name)
        except OSError as error:
            mine[name] = f"!{error.strerror or error}"
        if training is not None:
            training.place.within("checkpoint")
    said = [mine] if training is None else exchange_json(training, mine)
    every = {name: digest for word in said for name, digest in word.items()}
    for name, digest in every.items():
        if digest.startswith("!"):
            raise Damaged(name, digest[1:])
    return hashlib.sha256("\n".join(every[name] for name in names).encode()).hexdigest()


def _sha256(path: Path) -> str:
    """The digest of a file's bytes."""
    found = hashlib.sha256()
    with open_plain(path, follow=False) as file:
        while block := file.read(BLOCK):
            found.update(block)
    return found.hexdigest()
