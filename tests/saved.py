"""Look into checkpoints: every byte checked, every tensor whole."""

from pathlib import Path

import torch

from plait.checkpoint.manifest import Manifest, read_manifest
from plait.checkpoint.reading import Reader


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name (`model/…`, `optimizer/…`), and the optimizer's numbers."""
    manifest = read_manifest(path)
    reader = Reader(path, manifest.files, manifest.tensors)
    for name in manifest.files:
        reader.file(name)
    found = {name: reader.whole(name) for name in manifest.tensors}
    scalars = {name: v["value"] if isinstance(v, dict) else v for name, v in manifest.scalars.items()}
    return found | {name: torch.tensor(v) for name, v in scalars.items() if isinstance(v, (int, float))}


def manifest(path: Path) -> Manifest:
    return read_manifest(path)
