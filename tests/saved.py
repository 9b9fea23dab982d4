"""Look into checkpoints: every byte checked, every tensor whole."""

from pathlib import Path

from plait.chaos.record import tensors
from plait.checkpoint.manifest import Manifest, read_manifest

__all__ = ["manifest", "tensors"]


def manifest(path: Path) -> Manifest:
    return read_manifest(path)
