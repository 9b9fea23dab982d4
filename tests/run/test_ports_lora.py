"""The LoRA port: trained sharded, resumed, exported, and opened by transformers and peft with exactly the trained logits."""

import importlib.util
import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import Command
from torch import Tensor

from plait import Engine, Job, PlaitError
from plait.checkpoint.export import write_model_config
from plait.cli.main import main

PORT = Path(__file__).parents[2] / "examples/ports/lora"


@pytest.fixture(autouse=True)
def port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Its files can import each other, its base model is made by the test, and the output of libraries is discarded."""
    monkeypatch.syspath_prepend(str(PORT))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TQDM_DISABLE", "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    for name in ("chats", "before"):
        sys.modules.pop(name, None)


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"lora_{name}", PORT / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def logits(model: torch.nn.Module) -> Tensor:
    from chats import Chats

    model.eval()
    with torch.no_grad():
        return model(**{k: torch.stack([Chats()[i][0][k] for i in range(4)]) for k in ("input_ids",)}).logits


def opened(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_the_command_trains_resumes_and_exports(tmp_path: Path) -> None:
    from chats import base
    from peft import PeftModel

    folder = base()
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    job = str(PORT / "job.py")
    first = Command("train", job, "--plan", "fsdp=2", "--steps", "4", "--check", "none", folder=tmp_path)
    assert first.wait(300) == 0, first.output
    again = Command("train", job, "--plan", "pp=2", "--resume", "--steps", "6", "--check", "none", folder=tmp_path)
    assert again.wait(300) == 0 and "resumed from" in again.output, again.output
    run = tmp_path / "runs/latest"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    before = loaded("before").main(6)
    assert len(losses) == 6 and losses[0] == pytest.approx(before[0], abs=1e-5) and losses[-1] < losses[0] > before[-1]

    engine = Engine(loaded("job").job(), "dp=1", device="cpu", directory=run / "checkpoints", read_weights=False)
    engine.resume()
    trained = logits(engine.model)
    assert main(["checkpoint", "export", str(run), "--adapter", "--output", str(tmp_path / "adapter")]) == 0
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json", "tokenizer_config.json"}
    adapted = PeftModel.from_pretrained(opened(folder), str(tmp_path / "adapter"))
    assert torch.equal(logits(adapted), trained), "bit for bit"
    assert main(["checkpoint", "export", str(run), "--merge", "--output", str(tmp_path / "merged")]) == 0
    merged = opened(tmp_path / "merged")
    assert torch.equal(logits(merged), logits(adapted.merge_and_unload()))
    assert (logits(merged) - trained).abs().max() < 1e-4 < (trained - logits(opened(folder))).abs().max()
    assert (tmp_path / "merged/tokenizer_config.json").exists()


def full(folder: Path, kind: Any) -> Job:
    from transformers import AutoModelForCausalLM

    import plait

    return replace(loaded("job").job(), model=plait.pretrained(folder, AutoModelForCausalLM), weights=str(folder))


@pytest.mark.parametrize("tied", (False, True))
def test_a_model_without_an_adapter(tmp_path: Path, tied: bool, capfd: Any) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied, attention_dropout=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base", max_shard_size="8KB")
    job = full(tmp_path / "base", LlamaForCausalLM)
    run = tmp_path / "run"
    run.mkdir()
    with Engine(job, "dp=1", device="cpu", directory=run / "checkpoints") as engine:
        started = opened(tmp_path / "base")
        assert all(torch.equal(t, engine.model.state_dict()[n]) for n, t in started.state_dict().items())
        write_model_config(engine.model, job.weights, run / "hf")
        for batch, _ in zip(engine.batches(), range(2)):
            engine.step(batch)
        engine.save()
        trained = logits(engine.model)
    assert main(["checkpoint", "export", str(run), "--output", str(tmp_path / "out")]) == 0
    again = opened(tmp_path / "out")
    assert type(again) is LlamaForCausalLM and again.config.attention_dropout == 0.1
    assert torch.equal(logits(again), trained) and not torch.equal(logits(started), trained)
    assert main(["checkpoint", "export", str(run), "--adapter", "--output", str(tmp_path / "none")]) == 2
    assert "error[K022]" in capfd.readouterr().err


def test_adapters_of_the_bases_numbers_are_refused() -> None:
    from peft import LoraConfig, get_peft_model

    job, made = loaded("job").job(), loaded("job")
    pretrained = made.plait.pretrained(made.base(), made.AutoModelForCausalLM)
    for words in ({"use_dora": True}, {"init_lora_weights": "pissa"}):
        lora = LoraConfig(r=2, target_modules=["q_proj"], **words)
        with pytest.raises(PlaitError) as caught:
            Engine(replace(job, model=lambda lora=lora: get_peft_model(pretrained(), lora)), "dp=1", device="cpu")
        assert caught.value.codes == ["K021"]


def test_the_base_is_made_once() -> None:
    from chats import base

    made = base()
    stamp = os.stat(made / "model.safetensors").st_mtime_ns
    assert base() == made and os.stat(made / "model.safetensors").st_mtime_ns == stamp
    shutil.rmtree(made)
