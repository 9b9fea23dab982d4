"""Jobs made from a Hugging Face config alone: every command accepts `hf:FOLDER`, runs no code of it and downloads nothing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.cli.main import main
from plait.config.errors import PlaitError
from plait.config.job import Job, load_job
from plait.model.fake_model import sketch_fake_model

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 37}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 24, **SIZES},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 24, "num_key_value_heads": 2, **SIZES},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 37},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "max_position_embeddings": 24, "num_key_value_heads": 2, "num_local_experts": 4, **SIZES},
    "bert": {"architectures": ["BertForMaskedLM"], "max_position_embeddings": 24, **SIZES},
    "roberta": {"architectures": ["RobertaForMaskedLM"], "max_position_embeddings": 26, "pad_token_id": 1, **SIZES},
    "t5": {"architectures": ["T5ForConditionalGeneration"], "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 37,
           "n_positions": 24},
    "bart": {"architectures": ["BartForConditionalGeneration"], "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 37,
             "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 24},
    "vit": {"architectures": ["ViTForImageClassification"], "hidden_size": 16, "num_attention_heads": 2},
    "whisper": {"architectures": ["WhisperForConditionalGeneration"]},
}  # fmt: skip


def written(folder: Path, kind: str, **changes: Any) -> str:
    """A folder with a changed config of a model type. Returns its name as a job."""
    values = {"model_type": kind, **CONFIGS.get(kind, {}), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))
    return f"hf:{folder}"


def refused(name: str, **arguments: str) -> str:
    """The single problem of a job."""
    with pytest.raises(PlaitError) as raised:
        load_job(name, arguments)
    (problem,) = raised.value.problems
    assert problem.fix or problem.why
    return str(problem)


def loss_of(job: Job) -> tuple[str, torch.Tensor]:
    """The class of the job's model, and the loss of a batch."""
    model, data = job.model(), job.data()
    samples = [data[i] for i in range(3)]
    inputs = {name: torch.stack([x[name] for x, _ in samples]) for name in samples[0][0]}
    return type(model).__name__, job.loss(model(**inputs), torch.stack([y for _, y in samples]))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "mixtral", "bert", "roberta", "t5", "bart"])
def test_the_model_that_the_config_names_is_trained_on_tokens(kind: str, tmp_path: Path) -> None:
    job = load_job(written(tmp_path, kind), {"seq": "12", "batch": "6"})
    name, loss = loss_of(job)
    loss.backward()
    assert name == CONFIGS[kind]["architectures"][0] and job.batch == 6
    assert loss.isfinite() and 2 < loss.item() < 6  # about log(37)
    assert job.data()[5][1].shape == (12,) and torch.equal(job.data()[5][1], job.data()[5][1])


def test_decoders_predict_the_next_token_and_masked_models_the_same_one(tmp_path: Path) -> None:
    inputs, targets = load_job(written(tmp_path, "llama")).data()[0]
    assert torch.equal(inputs["input_ids"][1:], targets[:-1])
    inputs, targets = load_job(written(tmp_path, "bert")).data()[0]
    assert torch.equal(inputs["input_ids"], targets)
    inputs, targets = load_job(written(tmp_path, "t5")).data()[0]
    assert torch.equal(inputs["decoder_input_ids"][1:], targets[:-1]) and not torch.equal(inputs["input_ids"][1:], targets[:-1])


@pytest.mark.parametrize(("kind", "made"), [("llama", "LlamaForCausalLM"), ("bert", "BertForMaskedLM"), ("bart", "BartForConditionalGeneration")])
def test_without_architectures_the_model_type_decides(kind: str, made: str, tmp_path: Path) -> None:
    assert type(load_job(written(tmp_path, kind, architectures=...)).model()).__name__ == made


def test_a_config_file_of_any_name_is_taken(tmp_path: Path) -> None:
    written(tmp_path, "llama")
    (tmp_path / "config.json").rename(tmp_path / "large.json")
    assert load_job(f"hf:{tmp_path}/large.json").batch == (4 << 20) // 24


@pytest.mark.parametrize(
    ("kind", "changes", "length", "said"),
    [
        ("llama", {}, 24, "seq=24 (the config's max_position_embeddings)"),
        ("llama", {"max_position_embeddings": 131072}, 8192, "seq=8192 (of max_position_embeddings 131072; --seq N for another)"),
        ("gpt2", {}, 24, "seq=24 (the config's n_positions)"),
        ("roberta", {}, 24, "seq=24 (the config's max_position_embeddings)"),
        ("t5", {"n_positions": ...}, 2048, "seq=2048 (the config has no limit)"),
    ],
)  # fmt: skip
def test_the_length_that_is_taken_is_printed(
    kind: str, changes: dict[str, Any], length: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = load_job(written(tmp_path, kind, **changes))
    assert said in capsys.readouterr().err
    assert job.data()[0][1].shape == (length,) and job.batch == (4 << 20) // length


@pytest.mark.parametrize(("kind", "most"), [("gpt2", 24), ("bert", 24), ("roberta", 24), ("bart", 24)])
def test_a_table_of_positions_bounds_the_length(kind: str, most: int, tmp_path: Path) -> None:
    name = written(tmp_path, kind)
    assert loss_of(load_job(name, {"seq": str(most)}))[1].isfinite()
    text = refused(name, seq=str(most + 1))
    assert text.startswith("error[J057]") and f"at most {most} tokens" in text and f"--seq {most}" in text


def test_rotary_positions_go_on_and_a_warning_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert loss_of(load_job(written(tmp_path, "llama"), {"seq": "40"}))[1].isfinite()
    assert "--seq exceeds max_position_embeddings 24" in capsys.readouterr().err
    assert refused(written(tmp_path, "llama"), seq="0").startswith("error[J057]")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    assert "downloads nothing" in refused("hf:meta-llama/Llama-3.1-8B") and "hf download" in refused("hf:gpt2")
    assert refused("hf:" + "x" * 5000).startswith("error[J055]") and refused("hf:").startswith("error[J055]")
    assert "has no config.json" in refused(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "llama",')
    text = refused(f"hf:{tmp_path}")
    assert text.startswith("error[J055]") and "is not a Hugging Face config" in text and "JSONDecodeError" in text
    (tmp_path / "config.json").write_text("[1]")
    assert "it is a list" in refused(f"hf:{tmp_path}")


def test_model_types_that_transformers_does_not_have(tmp_path: Path) -> None:
    assert "did you mean  llama ?" in refused(written(tmp_path, "lama", architectures=["LamaForCausalLM"]))
    assert "has no model_type" in refused(written(tmp_path, "llama", model_type=...))


def test_code_of_a_config_is_never_run(tmp_path: Path) -> None:
    for file in ("configuration_own.py", "modeling_own.py"):
        (tmp_path / file).write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    code = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    text = refused(written(tmp_path, "own", auto_map=code))
    assert text.startswith("error[J056]") and "trust_remote_code" in text
    own = load_job(written(tmp_path, "llama", auto_map=code, attn_implementation="some/kernels"))  # transformers has a separate class
    assert type(own.model()).__module__ == "transformers.models.llama.modeling_llama"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("vit", {}, "ViTForImageClassification needs inputs other than token ids"),
        ("wav2vec2", {"architectures": ["Wav2Vec2ForCTC"]}, "Wav2Vec2ForCTC needs inputs other than token ids"),
        ("whisper", {}, "WhisperForConditionalGeneration is not trained to predict tokens"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, '"architectures": ["LlamaForCausalLM"]'),
        ("llama", {"hidden_size": "wide"}, "transformers cannot read the config"),
    ],
)
def test_what_is_no_language_model(kind: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    text = refused(written(tmp_path, kind, **changes))
    assert text.startswith("error[J056]") and said in text


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = written(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert refused(name).startswith("error[U010] transformers is not installed")


def test_commands_take_it_and_training_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = written(tmp_path, "llama")
    assert main(["plan", name, "--machine", "h100x2", "--seq", "16", "--batch", "4", "--json"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["batch"] == 4 and "LlamaForCausalLM on random tokens" in out.err
    assert main(["plan", name, "--plan", "fsdp=2", "--dry-run", "--seq", "8", "--batch", "4", "--json"]) == 0
    capsys.readouterr()
    assert main(["plan", name, "--plan", "tp=2", "--show", "tensor", "--seq", "8"]) == 0
    assert "q_proj" in capsys.readouterr().out
    assert main(["sketch", name, "--seq", "8", "--json"]) == 0
    capsys.readouterr()
    assert main(["train", name, "--nproc", "1"]) == 2
    assert "error[J058]" in capsys.readouterr().err
    assert main(["submit", "slurm", name, "--plan", "dp=2", "--nnodes", "1"]) == 2
    assert "error[J058]" in capsys.readouterr().err


def test_the_batch_of_the_command_is_that_of_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needs = []
    for batch in ("2", "8"):
        main(["plan", written(tmp_path, "llama"), "--plan", "dp=1", "--dry-run", "--batch", batch, "--json"])
        needs.append(json.loads(capsys.readouterr().out)["kinds"][0]["peak"])
    assert needs[0] != needs[1]


def test_a_folder_without_the_prefix_is_recognized(tmp_path: Path) -> None:
    written(tmp_path, "llama")
    assert f"hf:{tmp_path}" in refused(str(tmp_path))


def test_a_large_mixture_is_sketched_without_its_weights(tmp_path: Path) -> None:
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_local_experts": 8, "num_hidden_layers": 8, "num_attention_heads": 8}
    model, sketch = sketch_fake_model(load_job(written(tmp_path, "mixtral", **large), {"seq": "16"}))
    assert sum(p.numel() for p in model.parameters()) > 7e8
    assert not sketch.unmeasured


def test_the_longest_sequence_that_fits_ends_at_the_table_of_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = written(tmp_path, "gpt2", n_positions=200)
    assert main(["plan", name, "--machine", "h100x1", "--batch", "2", "--objective", "max-batch", "--maximize", "seq", "--json"]) == 0
    out = capsys.readouterr()
    told = json.loads(out.out)["told"]
    assert 190 <= int(told.split()[1]) <= 200 and out.err.count("random tokens") == 2  # that of the default, and one for all candidates
