"""Small versions of models that users train: the examples' own, and the Hugging Face library's."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import plait

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str, **arguments: Any) -> plait.Job:
    """The job of an example, with different arguments."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / name / "job.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.job(**arguments)


class Rows:
    """Random token rows under the input name of a Hugging Face model; targets are shifted by one."""

    def __init__(self, n: int = 40, length: int = 8, vocabulary: int = 31):
        self.rows = torch.randint(0, vocabulary, (n, length + 1), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"input_ids": self.rows[i, :-1]}, self.rows[i, 1:]


def next_token(outputs: Any, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.logits.flatten(0, 1).float(), targets.flatten())


def hugging(model: Any, **fields: Any) -> plait.Job:
    given = {
        "loss": next_token,
        "data": Rows,
        "optimizer": lambda p: torch.optim.AdamW(p, 1e-2),
        "batch": 12,
        "steps": 6,
    }
    return plait.Job(**{"model": model, **given, **fields})


def llama(tied: bool = False) -> plait.Job:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=31, max_position_embeddings=16, tie_word_embeddings=tied, attention_dropout=0.1,
    )  # fmt: skip
    return hugging(lambda: LlamaForCausalLM(config))


def gpt2() -> plait.Job:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=31, n_positions=16)
    return hugging(lambda: GPT2LMHeadModel(config))


def gpt() -> plait.Job:
    return example("stdlib_gpt", depth=3, width=16, heads=2, length=8, dropout=0.1, batch=12)


def digits() -> plait.Job:
    return replace(example("digits", width=2), batch=12)


def unet() -> plait.Job:
    return example("unet", width=4, levels=1, batch=12)


ALL = {
    "unet_example": unet,
    "gpt": gpt,
    "digits": digits,
    "llama": llama,
    "llama_tied": lambda: llama(tied=True),
    "gpt2": gpt2,
}
