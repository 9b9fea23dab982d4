"""Files of tensors by name, in which processes of a proof leave what they computed. Complex tensors are stored as real pairs."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

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
