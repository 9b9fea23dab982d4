"""Jobs that start from given weights, with and without adapters on frozen ones: equal to one device, under each plan."""

import dataclasses
from pathlib import Path
from typing import Any

import jobs
import jobs_real
import pytest
import torch
from rarely import rarely
from safetensors.torch import save_file
from torch import Tensor, nn

import plait
from plait import Plan
from plait.checkpoint import foreign_weights
from plait.proof.verify import verify


class Packed(nn.Module):
    """A frozen 8-bit layer with a scale for each row, as parameters or as buffers, and a small trained layer in parallel."""

    def __init__(self, inputs: int, outputs: int, kind: str):
        super().__init__()
        weight = torch.randn(outputs, inputs) / inputs**0.5
        scale = weight.abs().amax(1, keepdim=True) / 127
        packed = (weight / scale).round().to(torch.int8).view(torch.uint8)
        for name, tensor in (("packed", packed), ("scale", scale)):
            if kind == "parameter":
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.packed.view(torch.int8).to(x.dtype) * self.scale
        return nn.functional.linear(x, weight) + self.up(self.down(x))


CASES = [("parameter", "fsdp=2")]
OTHERS = [(kind, plan) for kind in ("parameter", "buffer") for plan in ("dp=2", "fsdp=2", "tp=2", "pp=2")]


@pytest.mark.parametrize(("kind", "plan"), [*CASES, *rarely(*(case for case in OTHERS if case not in CASES))])
def test_packed_weights(kind: str, plan: str) -> None:
    def model() -> nn.Module:
        return nn.Sequential(Packed(6, 16, kind), nn.Tanh(), Packed(16, 16, kind), nn.Tanh(), nn.Linear(16, 1))

    verdict = verify(dataclasses.replace(jobs.mlp(), model=model), Plan.parse(plan), steps=3)
    assert verdict.equal, verdict


def of_files(folder: Path) -> plait.Job:
    """A job whose weights are in a file, and differ from those that its model draws."""
    job = jobs.mlp()
    torch.manual_seed(99)
    save_file(
        {name: torch.randn_like(t) * 0.3 for name, t in job.model().state_dict().items()}, folder / "w.safetensors"
    )
    return dataclasses.replace(job, weights=str(folder / "w.safetensors"))


@pytest.mark.parametrize(
    "plan", ("fsdp=2 microbatches=2", *rarely("dp=2", "tp=2", "pp=2", "pp=2 microbatches=3", "dp=2 fsdp=2"))
)
def test_weights_of_a_file(plan: str, tmp_path: Path) -> None:
    verdict = verify(of_files(tmp_path), Plan.parse(plan), steps=3)
    assert verdict.equal, verdict


def test_weights_that_are_not_read_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, forgotten = foreign_weights.CheckpointReader.read_part, []

    def careless(self: Any, name: str, part: Any) -> None:
        if name.endswith("weight") and not forgotten:
            forgotten.append(name)
            return
        read(self, name, part)

    monkeypatch.setattr(foreign_weights.CheckpointReader, "read_part", careless)
    assert not verify(of_files(tmp_path), Plan.parse("dp=2"), steps=3).equal


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft reads an attribute that transformers renamed
@pytest.mark.parametrize("lora", (False, True))
@pytest.mark.parametrize("kind", ("llama", "qwen2", "gpt2"))
@pytest.mark.parametrize("plan", rarely("dp=2", "fsdp=2 microbatches=2", "tp=2", "pp=2", "cp=2"))
def test_hugging_face_folders(kind: str, lora: bool, plan: str, tmp_path: Path) -> None:
    import peft
    import transformers

    small = {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "vocab_size": 31,
    }
    configs = {
        "llama": transformers.LlamaConfig(**small, num_key_value_heads=2, tie_word_embeddings=True),
        "qwen2": transformers.Qwen2Config(**small, num_key_value_heads=2),
        "gpt2": transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=31, n_positions=16),
    }
    torch.manual_seed(99)
    transformers.AutoModelForCausalLM.from_config(configs[kind]).save_pretrained(tmp_path, max_shard_size="4KB")
    made = plait.pretrained(tmp_path, transformers.AutoModelForCausalLM)

    def model() -> nn.Module:
        targets = ["c_attn"] if kind == "gpt2" else ["q_proj", "v_proj"]
        return peft.get_peft_model(made(), peft.LoraConfig(r=4, target_modules=targets, fan_in_fan_out=kind == "gpt2")) if lora else made()

    assert verify(jobs_real.hugging(model, weights=str(tmp_path)), Plan.parse(plan), steps=3).equal
