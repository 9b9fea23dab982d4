"""The data and the model of both scripts of this port: a small Llama in the format of `save_pretrained`, and a few conversations.

With a real model, `base` would be the folder downloaded by `hf download`, and its tokenizer would define tokens. Here a token is a byte.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 40
CHATS = [
    ("two plus two?", "four."), ("a colour?", "blue."), ("capital of Peru?", "Lima."), ("say hi", "hi there!"),
    ("three minus one?", "two."), ("a fruit?", "a plum."), ("capital of Togo?", "Lome."), ("say bye", "so long!"),
]  # fmt: skip


def base() -> Path:
    """Return the folder of the pretrained model; it is made on first use."""
    folder = Path(tempfile.gettempdir()) / "plait-tiny-llama"
    if not (folder / "config.json").exists():
        config = LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        torch.manual_seed(11)
        with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
            LlamaForCausalLM(config).save_pretrained(Path(beside) / "model")
            (Path(beside) / "model").rename(folder)
    return folder


class Chats:
    """Conversations of one length: `input_ids`, and as targets the tokens shifted by one, with −100 for tokens without a loss.

    The model learns the answers. Questions and padding count neither in the loss nor in its mean.
    """

    def __len__(self) -> int:
        return len(CHATS)

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        asked, answer = (text.encode() for text in CHATS[i])
        tokens = torch.tensor([1, *asked, 10, *answer, 2])
        learnt = torch.full((LENGTH + 1,), -100)
        learnt[len(asked) + 2 : len(tokens)] = tokens[len(asked) + 2 :]
        padded = torch.zeros(LENGTH + 1, dtype=torch.long)
        padded[: len(tokens)] = tokens
        return {"input_ids": padded[:-1]}, learnt[1:]
