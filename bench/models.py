"""Runs `plait verify` on unmodified models of the Hugging Face library: which plans train them exactly, which are rejected and why.

    python bench/models.py                                     every family under pp, tp, cp, and ep for mixtures
    python bench/models.py --only Llama,Bart --plan cp=2       some families, under one plan
    python bench/models.py --out found.jsonl                   saves the results, and resumes from them
    plait verify bench/models.py --job.name Llama --plan pp=2  one family by hand

The models are small, with random weights; every setting except sizes is the library's default. Each check runs in its own process,
with a time limit. No weights and no data are downloaded.
"""

import argparse
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import plait
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.proof.verify import verify

PLANS = ("pp=2 microbatches=2", "tp=2", "cp=2")
MIXTURES = "ep=2"
WORDS, LENGTH, IMAGE = 37, 8, 32
SMALL = MappingProxyType({
    "vocab_size": WORDS, "hidden_size": 16, "d_model": 16, "n_embd": 16, "dim": 16, "embed_dim": 16, "word_embed_proj_dim": 16,
    "embedding_size": 16, "intermediate_size": 24, "ffn_hidden_size": 24, "n_inner": 24, "ffn_dim": 24, "hidden_dim": 24,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_ff": 24, "d_inner": 24, "d_kv": 8, "head_dim": 8,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "encoder_layers": 2, "decoder_layers": 2,
    "num_attention_heads": 2, "n_head": 2, "n_heads": 2, "num_heads": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 24, "n_positions": 24,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    "image_size": IMAGE, "patch_size": 8, "num_labels": 5, "rotary_dim": 4, "type_vocab_size": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8, "state_size": 4,
})  # fmt: skip
"""Sizes for the attributes that a family's config has."""


@dataclass(frozen=True)
class Family:
    """A class of the library, its task, and sizes in addition to `SMALL` (`...`: the library's own)."""

    model: str
    task: str = "causal"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    """Nested configs that get small sizes, too."""
    mixture: bool = False


def _of(task: str, mixture: bool = False, **models: Mapping[str, Any]) -> dict[str, Family]:
    found = {}
    for model, sizes in models.items():
        name = model.partition("For")[0].removesuffix("LMHeadModel").removesuffix("LMHead").removesuffix("Model")
        name = "BartClasses" if model == "BartForSequenceClassification" else name
        parts = tuple(sizes.get("parts", ()))
        found[name] = Family(model, task, {k: v for k, v in sizes.items() if k != "parts"}, parts, mixture)
    return found


FAMILIES = MappingProxyType({
    **_of(
        "causal", LlamaForCausalLM={}, GPT2LMHeadModel={}, PhiForCausalLM={}, Phi3ForCausalLM={}, MistralForCausalLM={},
        Qwen2ForCausalLM={}, Qwen3ForCausalLM={}, GemmaForCausalLM={}, Gemma2ForCausalLM={}, Gemma3ForCausalLM={},
        StableLmForCausalLM={}, CohereForCausalLM={}, Cohere2ForCausalLM={}, OlmoForCausalLM={}, Olmo2ForCausalLM={},
        Olmo3ForCausalLM={}, GraniteForCausalLM={}, GPTNeoXForCausalLM={}, GPTNeoXJapaneseForCausalLM={},
        GPTJForCausalLM={}, GPTNeoForCausalLM={"attention_types": [[["global", "local"], 2]]}, CodeGenForCausalLM={"num_attention_heads": 4},
        GPTBigCodeForCausalLM={}, OPTForCausalLM={}, BloomForCausalLM={}, FalconForCausalLM={"head_dim": ...}, MptForCausalLM={},
        NemotronForCausalLM={}, Starcoder2ForCausalLM={}, GlmForCausalLM={}, Glm4ForCausalLM={}, Ernie4_5ForCausalLM={},
        SmolLM3ForCausalLM={}, PersimmonForCausalLM={}, XGLMForCausalLM={"attention_heads": 2}, BioGptForCausalLM={},
        HeliumForCausalLM={}, ArceeForCausalLM={}, SeedOssForCausalLM={}, Exaone4ForCausalLM={}, ApertusForCausalLM={},
        CTRLLMHeadModel={"dff": 24}, OpenAIGPTLMHeadModel={}, MambaForCausalLM={}, FalconMambaForCausalLM={},
        Mamba2ForCausalLM={"num_heads": 4, "head_dim": 8, "n_groups": 2, "chunk_size": 4}, RwkvForCausalLM={},
        BambaForCausalLM={"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4, "attn_layer_indices": [1, 3]},
        RecurrentGemmaForCausalLM={"lru_width": 16, "attention_window_size": 16, "num_hidden_layers": 6},
        Lfm2ForCausalLM={"layer_types": ["conv", "full_attention"] * 2},
    ),
    **_of(
        "causal", True, MixtralForCausalLM={}, Qwen2MoeForCausalLM={}, Qwen3MoeForCausalLM={}, OlmoeForCausalLM={},
        GptOssForCausalLM={}, GraniteMoeForCausalLM={}, PhimoeForCausalLM={},
        DeepseekV3ForCausalLM={"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 8,
                               "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
        Llama4ForCausalLM={"intermediate_size_mlp": 24},
        JambaForCausalLM={"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_d_state": 4, "mamba_dt_rank": 4},
    ),
    **_of(
        "masked", BertForMaskedLM={}, RobertaForMaskedLM={}, XLMRobertaForMaskedLM={}, DebertaForMaskedLM={}, DebertaV2ForMaskedLM={},
        ElectraForMaskedLM={}, AlbertForMaskedLM={}, DistilBertForMaskedLM={}, EsmForMaskedLM={"mask_token_id": 3},
        FNetForMaskedLM={}, MPNetForMaskedLM={}, ModernBertForMaskedLM={}, MobileBertForMaskedLM={
            "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16}, RoFormerForMaskedLM={}, CamembertForMaskedLM={},
        ConvBertForMaskedLM={"num_attention_heads": 4, "embedding_size": 16}, XLNetLMHeadModel={"max_position_embeddings": ...},
        PerceiverForMaskedLM={"d_latents": 16, "num_latents": 6, "max_position_embeddings": LENGTH, "num_blocks": 1, "num_self_attends_per_block": 3,
                              "num_self_attention_heads": 2, "num_cross_attention_heads": 2, "qk_channels": 16, "v_channels": 16},
    ),
    **_of(
        "both", BartForConditionalGeneration={}, MBartForConditionalGeneration={}, PegasusForConditionalGeneration={},
        MarianMTModel={}, T5ForConditionalGeneration={}, MT5ForConditionalGeneration={}, BlenderbotForConditionalGeneration={},
        M2M100ForConditionalGeneration={}, ProphetNetForConditionalGeneration={
            "num_hidden_layers": ..., "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 2,
            "num_decoder_attention_heads": 2},
    ),
    **_of("words", BartForSequenceClassification={}),
    **_of(
        "image", ViTForImageClassification={}, DeiTForImageClassification={}, BeitForImageClassification={},
        Dinov2ForImageClassification={}, ViTMSNForImageClassification={}, SiglipForImageClassification={"parts": ["vision_config"]},
        SegformerForImageClassification={"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2]},
        SwinForImageClassification={"num_layers": ..., "num_attention_heads": ..., "hidden_size": ..., "embed_dim": 8, "depths": [2, 2],
                                    "num_heads": [1, 2], "window_size": 2, "patch_size": 4},
        ResNetForImageClassification={"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]},
        ConvNextForImageClassification={"patch_size": 4, "depths": [1, 1, 2, 1], "hidden_sizes": [8, 8, 16, 16]},
        ConvNextV2ForImageClassification={"patch_size": 4, "depths": [1, 1, 2, 1], "hidden_sizes": [8, 8, 16, 16]},
        MobileViTForImageClassification={"hidden_sizes": [16, 16, 16], "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16], "patch_size": 2},
        PvtForImageClassification={"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2],
                                   "image_size": 64},
        PoolFormerForImageClassification={"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "patch_size": 7},
    ),
    **_of("audio", Wav2Vec2ForSequenceClassification={
        "conv_dim": [8, 8], "conv_stride": [4, 4], "conv_kernel": [8, 8], "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8, "mask_time_prob": 0.0}),
    **_of("series", PatchTSTForPrediction={"num_input_channels": 2, "context_length": 16, "prediction_length": 4, "patch_length": 4,
                                           "patch_stride": 4}),
    **_of("speech", WhisperForConditionalGeneration={"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}),
    **_of("pairs", CLIPModel={"parts": ["text_config", "vision_config"], "projection_dim": 16}),
    **_of("looks", LlavaForConditionalGeneration={"parts": ["text_config", "vision_config"], "image_token_index": 5}),
})  # fmt: skip


def config_of(family: Family) -> Any:
    """Return its config: the library's defaults with small sizes."""
    import transformers

    kind = getattr(transformers, family.model).config_class
    plain = kind()
    sizes = {name: value for name, value in SMALL.items() if hasattr(plain, name)} | family.sizes
    for part in family.parts:
        inner = getattr(plain, part)
        given = {n: v for n, v in SMALL.items() if hasattr(inner, n)}
        sizes[part] = {"model_type": inner.model_type, **given}
    return kind(**{name: value for name, value in sizes.items() if value is not ...})


class Samples:
    """Deterministic samples of a task: the inputs and targets of its models."""

    def __init__(self, task: str, n: int = 64):
        self.task, self.n = task, n
        draw = torch.Generator().manual_seed(7)
        self.rows = torch.randint(6, WORDS - 1, (n, LENGTH + 1), generator=draw)
        self.ends = self.rows[:, :-1].clone()
        self.ends[:, -1] = 2
        self.classes = torch.randint(0, 5, (n,), generator=draw)
        sizes = {"image": (3, IMAGE, IMAGE), "audio": (160,), "series": (20, 2), "speech": (8, 16)}
        shape = (3, 64, 64) if task == "image64" else sizes.get(task, sizes["image"])
        self.numbers = torch.randn((n, *shape), generator=draw)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        words, later, numbers, task = self.rows[i, :-1], self.rows[i, 1:], self.numbers[i], self.task
        looks = torch.cat([torch.full((16,), 5), words])
        inputs = {
            "causal": {"input_ids": words}, "masked": {"input_ids": words}, "words": {"input_ids": self.ends[i]},
            "both": {"input_ids": words, "decoder_input_ids": words.flip(0)}, "image": {"pixel_values": numbers},
            "image64": {"pixel_values": numbers}, "audio": {"input_values": numbers}, "series": {"past_values": numbers[:16]},
            "speech": {"input_features": numbers, "decoder_input_ids": words}, "looks": {"input_ids": looks, "pixel_values": numbers},
            "pairs": {"input_ids": self.ends[i], "pixel_values": numbers},
        }  # fmt: skip
        targets = {"masked": words, "words": self.classes[i], "image": self.classes[i], "image64": self.classes[i],
                   "audio": self.classes[i], "series": numbers[16:], "looks": torch.cat([looks[1:], looks[:1]]), "pairs": words}  # fmt: skip
        return inputs[task], targets.get(task, later)


def _words(out: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(out.logits.flatten(0, -2), targets.flatten())


LOSSES = MappingProxyType({
    "series": lambda out, targets: F.mse_loss(out.prediction_outputs, targets),
    "pairs": lambda out, _: (1 - F.cosine_similarity(out.text_embeds, out.image_embeds)).mean(),
})  # fmt: skip


def job(name: str = "Llama") -> plait.Job:
    """The job of a family, by the family's name here."""
    family = FAMILIES[name]
    config = config_of(family)

    def model() -> Any:
        import transformers

        return getattr(transformers, family.model)(config)

    task = "image64" if name == "Pvt" else family.task
    loss = LOSSES.get(task, _words)
    return plait.Job(
        model=model,
        loss=loss,
        data=lambda: Samples(task),
        optimizer=lambda p: torch.optim.AdamW(p, 1e-2),
        batch=12,
        steps=4,
    )


def checked(name: str, plan: str) -> dict[str, Any]:
    """Return the result of `plait verify` for a family under a plan."""
    try:
        verdict = verify(job(name), Plan.parse(plan), 3, "cpu")
    except PlaitError as error:
        problem = error.problems[0]
        said = "refused" if problem.code[0] == "P" and error.exit_code == 2 else "failed"
        return {
            "said": "one device" if problem.code == "J011" else said,
            "why": f"{problem.code} {problem.what}: {problem.why}",
        }
    except BaseException as error:
        return {"said": "failed", "why": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    if not verdict.equal:
        named = "not exact" if verdict.inexact else "WRONG"
        return {
            "said": named,
            "why": "; ".join(verdict.inexact) or f"{verdict.code} {verdict.parameter} {verdict.cause}",
        }
    return {"said": "equal", "why": "; ".join(verdict.inexact)}


def apart(work: Callable[[], dict[str, Any]], bound: float) -> dict[str, Any]:
    """Return the result of `work`, run in a forked process. After `bound` seconds, the process and its children are ended."""
    sys.stdout.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(reading)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        with os.fdopen(writing, "w") as out:
            json.dump(work(), out)
        os._exit(0)
    os.close(writing)
    end = time.monotonic() + bound
    while time.monotonic() < end and not os.waitpid(child, os.WNOHANG)[0]:
        time.sleep(0.05)
    else:
        if time.monotonic() >= end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
    with os.fdopen(reading) as given:
        text = given.read()
    return json.loads(text) if text else {"said": "failed", "why": f"not done after {bound:.0f} s, or killed"}


def table(found: list[dict[str, Any]]) -> str:
    """Format the number of models that each plan trains exactly, and the other results (`one device`: it fails there, in float64)."""
    kinds = ("equal", "refused", "not exact", "one device", "WRONG", "failed")
    lines = [f"| plan | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for plan in dict.fromkeys(row["plan"] for row in found):
        said = [row["said"] for row in found if row["plan"] == plan]
        lines.append(f"| `{plan}` | {' | '.join(str(said.count(kind)) for kind in kinds)} |")
    return "\n".join(lines)


def main() -> int:
    """Run the requested checks; returns 1 if a plan is wrong or a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="families, with commas between them")
    parser.add_argument("--plan", action="append", help="instead of the usual ones; may come several times")
    parser.add_argument("--bound", type=float, default=300.0, help="seconds a check may take (300)")
    parser.add_argument(
        "--out", type=Path, help="a file with a line of JSON for each check; those in it are not made again"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    found = (
        [json.loads(line) for line in options.out.read_text().splitlines()]
        if options.out and options.out.exists()
        else []
    )
    done = {(row["model"], row["plan"]) for row in found}
    names = options.only.split(",") if options.only else list(FAMILIES)
    for name in names:
        plans = options.plan or [*PLANS, *([MIXTURES] if FAMILIES[name].mixture else [])]
        for plan in plans:
            if (name, plan) in done:
                continue
            row = {
                "model": name,
                "plan": plan,
                **apart(lambda name=name, plan=plan: checked(name, plan), options.bound),
            }
            found.append(row)
            print(f"{name:<22}{plan:<22}{row['said']:<10}{row['why']}", flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(f"\n{len({row['model'] for row in found})} models\n{table(found)}")
    return int(any(row["said"] in ("WRONG", "failed") for row in found))


if __name__ == "__main__":
    sys.exit(main())
