"""Llama, from a toy to 405 billion parameters, with random weights, on the Python standard library's own source.

    plait train  examples/llama/job.py --nproc 2
    plait sketch examples/llama/job.py --job.size 70b

The model is that of the `transformers` package (pip install plait[transformers]), unchanged; nothing is downloaded.
A token is a byte, for every vocabulary size. The sketch of the largest size needs no memory for its weights.
"""

import os
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import plait

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 256},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 128256},
    "405b": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
             "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
"""The shapes of Llama 3: of its versions 3.2 (1b) and 3.1 (8b, 70b, 405b)."""


@cache
def corpus() -> Tensor:
    """The source of the standard library as one row of bytes, in the order of the file names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
    files = list[Path]()
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in skip]  # other folders are skipped
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort()
    return torch.frombuffer(bytearray(b"\n".join(p.read_bytes() for p in files)), dtype=torch.uint8)


class Text:
    """Windows of `length` bytes and, as targets, the same windows one byte later."""

    def __init__(self, length: int):
        self.text, self.length = corpus(), length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        window = self.text[i * self.length : (i + 1) * self.length + 1].long()
        return {"input_ids": window[:-1]}, window[1:]


def loss(outputs: Any, targets: Tensor) -> Tensor:
    """The mean over tokens."""
    return cross_entropy(outputs.logits.flatten(0, 1).float(), targets.flatten())


def job(
    size: str = "tiny", length: int = 128, batch: int = 16, steps: int = 100, lr: float = 1e-3, tied: bool = False,
    attention: str = "sdpa",
) -> plait.Job:  # fmt: skip
    """`attention`: sdpa or eager. `tied`: the head is the embedding's own matrix."""
    config = LlamaConfig(
        **SIZES[size], max_position_embeddings=length, rope_theta=500000.0, tie_word_embeddings=tied, use_cache=False,
        attn_implementation=attention,
    )  # fmt: skip
    return plait.Job(
        model=lambda: LlamaForCausalLM(config),
        loss=loss,
        data=lambda: Text(length),
        optimizer=lambda params: torch.optim.AdamW(params, lr=lr, fused=True),
        batch=batch,
        steps=steps,
        clip=1.0,
    )
