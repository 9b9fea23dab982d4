"""LoRA as a plait job: the model, the adapter and the loss are those of before.py; the plan defines the shards of each rank.

    plait train  examples/ports/lora/job.py --plan fsdp=2
    plait verify examples/ports/lora/job.py --plan tp=2
    plait checkpoint export runs/latest --adapter --output adapter      # for PeftModel.from_pretrained
    plait checkpoint export runs/latest --merge --output merged         # for AutoModelForCausalLM.from_pretrained

Each rank reads its own shards of the base, and no rank loads all of it. A checkpoint contains only the adapter and its optimizer state.
"""

from typing import Any

import torch
from chats import Chats, base
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

import plait


def loss(outputs: Any, targets: Tensor) -> Tensor:
    """The mean over the tokens of answers."""
    return cross_entropy(outputs.logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def job(steps: int = 20, rank: int = 8) -> plait.Job:
    """The job."""
    pretrained = plait.pretrained(base(), AutoModelForCausalLM)

    def model() -> nn.Module:
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return get_peft_model(pretrained(), lora)

    return plait.Job(
        model=model,
        weights=str(base()),
        loss=loss,
        weight=lambda targets: (targets != -100).sum(),
        data=Chats,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-2),
        batch=8,
        steps=steps,
        clip=1.0,
    )
