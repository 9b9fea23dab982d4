"""`bench/planner.py`: its scores are right, its output is complete, and the planner is as good as its docs state."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
import fit  # noqa: E402
import numpy as np  # noqa: E402
import scores  # noqa: E402
import shapes  # noqa: E402
from images import convolutional  # noqa: E402
from published import run_of  # noqa: E402
from scores import Case, choice, memory, spearman, times  # noqa: E402
from sites import machine_of, network  # noqa: E402

from plait.config.machine import Machine  # noqa: E402
from plait.planner import correction  # noqa: E402
from plait.planner.correction import RunTraits  # noqa: E402


def case(measured: float, predicted: float, group: str = "g", **others) -> Case:
    return Case("r", "s", group, measured, predicted, predicted * 0.8, predicted * 1.2, **others)


def test_errors_of_times() -> None:
    found = times([case(1.0, 1.1), case(2.0, 1.6), case(1.0, 3.0)])
    assert found["rows"] == 3 and found["mape"] == pytest.approx(100 * (0.1 + 0.2 + 2.0) / 3, abs=0.1)
    assert found["bias"] == 10.0 and found["inside_90"] == pytest.approx(66.7 if 1.6 * 1.2 >= 2 else 33.3, abs=0.1)


def test_regret_and_order() -> None:
    right = [case(1.0, 2.0), case(2.0, 3.0), case(3.0, 9.0)]
    assert choice(right)["regret"] == 1.0 and choice(right)["pairs_10"] == 100.0 and choice(right)["spearman"] == 1.0
    wrong = [case(1.0, 9.0), case(2.0, 3.0), case(3.0, 2.0)]
    assert choice(wrong)["regret"] == 3.0 and choice(wrong)["pairs_10"] == 0.0 and choice(wrong)["spearman"] == -1.0
    assert choice(wrong)["regret_random"] == 2.0 and choice(wrong)["regret_top3"] == 1.0
    ties = [case(1.0, 5.0), case(2.0, 5.0)]
    assert choice(ties)["pairs_10"] == 50.0
    large = [case(1.0, 1.0, said=False), case(2.0, 3.0)]
    assert choice(large)["regret"] == 2.0, "what is predicted not to fit is not chosen"


def test_equal_ranks_share_their_places() -> None:
    assert scores.ranks([3.0, 1.0, 3.0]) == [1.5, 0.0, 1.5]
    assert spearman([1, 1, 1], [1, 2, 3]) is None


def test_false_fits_are_counted() -> None:
    found = memory([case(1, 1, memory=100.0, reserved=110.0, fits=True), case(1, 1, fits=False, said=True),
                    case(1, 1, fits=False, said=False), case(1, 1, fits=True, said=False)])  # fmt: skip
    assert found["false_fits"] == 1 and found["out_of_memory"] == 2 and found["out_of_memory_recognised"] == 1
    assert found["ran_but_refused"] == 1 and found["mape"] == pytest.approx(10.0)


@pytest.mark.parametrize(
    "text, node, speed",
    [
        ("NVLink3; 8x200Gb/s HDR IB (Selene)", 8, 25e9), ("1600 Gb/s per node RoCE", 8, 25e9),
        ("NVLink4; 400 Gb/s CX-7 per GPU", 8, 50e9), ("DGX-H100", 8, None), ("4x100Gb/s RoCE per node", 8, 6.25e9),
        ("Intel OPA (measured all-reduce 20-60 Gb/s)", 4, 1.25e9),
    ],
)  # fmt: skip
def test_networks_are_read(text: str, node: int, speed: float | None) -> None:
    assert network(text, node) == speed


@pytest.mark.parametrize(
    "model, operations, weights",
    [
        ("ResNet-50", 7.7e9, 25.5e6), ("ResNet-101", 15.1e9, 44.4e6), ("ResNet-152", 22.6e9, 60.0e6),
        ("VGG16", 30.9e9, 138.3e6), ("InceptionV3", 11.4e9, 23.8e6), ("AlexNet", 1.68e9, 61.8e6),
    ],
)  # fmt: skip
def test_image_networks_are_their_layers(model: str, operations: float, weights: float) -> None:
    """Operations per image and weights, as in their papers and libraries."""
    plain, fast = convolutional(model, False), convolutional(model, True)
    assert plain and fast
    assert plain.flops == pytest.approx(operations, rel=0.01) and plain.weights == pytest.approx(weights, rel=0.01)
    versioned = convolutional(f"{model} v1.5", False)
    assert versioned and versioned.flops == plain.flops
    assert fast.weights == plain.weights and plain.flops / 4 < fast.flops < 0.8 * plain.flops


@pytest.mark.parametrize(
    "model, billions",
    [
        ("LLaMA 7B", 6.74), ("LLaMA-65B", 65.3), ("Llama 3.2 1B", 1.24), ("Llama-3.2-3B", 3.21), ("Mistral 7B", 7.24), ("gemma-7b", 8.54),
        ("Phi-3-mini", 3.82), ("Falcon 40B", 41.3), ("BLOOM 176B", 176.2), ("GPT-NeoX 20B", 20.6), ("GPT-J 6B", 6.05),
        ("MT-NLG", 530), ("OPT 66B", 65.7), ("Qwen2.5-72B", 72.7), ("Qwen2.5 7B", 7.6), ("Qwen3 32B", 32.8), ("Qwen3-8B", 8.19), ("GPT-2 XL", 1.56),
        ("BERT base", 0.11), ("Llama 3.1 70B", 70.6),
    ],
)  # fmt: skip
def test_models_known_by_name_have_their_size(model: str, billions: float) -> None:
    """Parameters, as their papers count them. Learned positions are not part of a shape."""
    shape = shapes.known(model)
    assert shape
    assert shapes.transformer(shape, 512, flash=True).weights / 1e9 == pytest.approx(billions, rel=0.025)


@pytest.mark.parametrize(
    "model, operations, weights",
    [("Stable Diffusion v1.5", 0.68e12, 0.86e9), ("SD 2.1", 0.68e12, 0.865e9), ("SDXL", 5.98e12, 2.57e9)],
)
def test_denoisers_are_their_layers(model: str, operations: float, weights: float) -> None:
    """Operations of a forward pass of one latent image, and weights, as in their papers and libraries."""
    work, whole = convolutional(model, False, "latents cached"), convolutional(model, False)
    assert work and whole and whole.flops > 1.15 * work.flops, "images are encoded in training, unless a row says that they are before"
    assert work.flops == pytest.approx(operations, rel=0.15) and work.weights == pytest.approx(weights, rel=0.1)


@pytest.mark.parametrize("params, hidden", [("175", 12288), ("6.7", 4096), ("1.3", 2048), ("200", 0)])
def test_a_decoder_of_which_only_its_parameters_are_known_has_them(params: str, hidden: int) -> None:
    run = run_of(ROW | {"model": f"GPT {params}B", "params_b": params, "layers": "", "hidden": "14400" if not hidden else ""})
    assert run.work and run.work.weights / 1e9 == pytest.approx(float(params), rel=0.08)
    assert not hidden or run.work.blocks[1].out / 2048 == pytest.approx(hidden, rel=0.2), "the family is about as wide"
    assert run_of(ROW | {"model": "MoE 7B", "params_b": "7", "layers": "", "hidden": ""}).why


@pytest.mark.parametrize(
    "note, device, name, fused",
    [
        ("Megatron-DeepSpeed; fp16", "A100-SXM-80GB", "Megatron-DeepSpeed", False), ("NeMo 24.07", "H100-SXM-80GB", "Megatron-Core", True),
        ("torchtitan FSDP2", "H100-SXM-80GB", "torchtitan", True), ("", "A100-SXM-80GB", "torch", True), ("", "V100-SXM2-16GB", "torch", False),
    ],
)  # fmt: skip
def test_a_stack_is_known_by_what_a_row_says_of_its_software(note: str, device: str, name: str, fused: bool) -> None:
    run = run_of(ROW | {"note": note, "gpu": device})
    assert run.stack.name == name and run.work
    assert any(p.fused for block in run.work.blocks for p in block.products) == fused
    assert run_of(ROW | {"note": note, "gpu": device}, frozenset()).stack.name == "torch", "where no stack is known"


ROW = {
    "row_id": "x", "source": "a paper", "model": "a model", "layers": "24", "hidden": "2048", "heads": "16", "vocab": "32000",
    "seq_len": "2048", "gpu": "H100-SXM-80GB", "gpus": "16", "gpus_per_node": "8", "dp": "8", "tp": "2", "pp": "1",
    "micro_batch": "2", "global_batch": "64", "recompute": "none", "precision": "bf16", "measured_iter_time_s": "1.0",
}  # fmt: skip


def test_a_row_is_a_plan() -> None:
    run = run_of(ROW)
    plan, samples, batch = run.plans[0]
    assert not run.why and plan.tp == 2 and plan.shares == 8 and plan.microbatches == 4 and samples == 2 and batch == 64
    assert run.rate == 64.0


@pytest.mark.parametrize("gone, why", [("gpus", "devices"), ("layers", "sizes"), ("dp", "")])
def test_what_a_row_lacks_is_said(gone: str, why: str) -> None:
    assert "data sheet" in run_of(ROW | {"gpu": "an abacus"}).why, "it counts as a miss"
    assert why in run_of(ROW | {gone: ""}).why and bool(run_of(ROW | {gone: ""}).why) == bool(why)
    assert "multiply" in run_of(ROW | {"tp": "5"}).why


def test_samples_in_bins_have_their_mean_length() -> None:
    """NVIDIA's BERT recipe prints 512, the longest. Other rows are taken as printed."""
    bert = ROW | {
        "source": "NVIDIA/DeepLearningExamples",
        "model": "BERT-large",
        "seq_len": "512",
        "layers": "",
        "hidden": "",
    }
    rows = [
        run_of(bert | {"table_or_file": f"{where}/LanguageModeling/BERT/README.md"})
        for where in ("PyTorch", "TensorFlow")
    ]
    binned, plain = (run.work.flops for run in rows if run.work)
    assert 0.5 < binned / plain < 288 / 512


def test_the_fit_corrects_as_the_planner_does() -> None:
    """`bench/fit.py` repeats the formula with arrays. With and without measured runs the results are equal."""
    words = (("a", "x"), ("a", "y"), ("b", "x"), ("b", "y"), ("a", "x"), ("b", ""))
    pairs = [
        (RunTraits({**dict.fromkeys(correction.ERROR_DEVIATIONS, ""), "occasion": one, "model": other},
                dict.fromkeys(correction.PART_DEVIATIONS, 0.1 * at), dict.fromkeys(correction.SIZE_DEVIATIONS, 0.7 * at),
                    at % 2 == 1), 0.3 - 0.1 * at)
        for at, (one, other) in enumerate(words)
    ]  # fmt: skip
    sizes = (
        correction.ERROR_DEVIATIONS
        | correction.SIZE_DEVIATIONS
        | correction.PART_DEVIATIONS
        | {"noise": correction.NOISE, "routed": correction.MOE_NOISE}
    )
    for chosen in ([], [0, 3], [1, 2, 4]):
        left, deviations = fit.Errors.of(pairs).left(sizes, chosen)
        rest = [at for at in range(len(pairs)) if at not in chosen]
        said = [correction.fit_correction(pairs[at][0], [pairs[c] for c in chosen]) for at in rest]
        assert left == pytest.approx([pairs[at][1] - np.log(one.factor) for at, one in zip(rest, said)])
        assert deviations == pytest.approx([one.deviation for one in said])


@pytest.mark.parametrize(
    ("said", "sheet"),
    [("A100-SXM4-40GB", "a100-40gb"), ("A100 80GB PCIe", "a100-pcie"), ("A40", "a40"),
     ("A2000", None), ("A4000", "rtx-a4000"), ("RTX A6000", "rtx-a6000"), ("H20", "h20"),
     ("RTX 6000 Ada", "rtx-6000-ada"), ("RTX 6000", "quadro-rtx-6000"), ("RTX PRO 6000 Blackwell", "rtx-pro-6000"), ("RTX4090", "rtx-4090"),
     ("GeForce RTX 5090", "rtx-5090"), ("L40S", "l40s"), ("L4", "l4"), ("MI250X", "mi250x"), ("H200-SXM-141GB", "h200"),
     ("H100 PCIe", "h100-pcie"), ("H100-PCIe-80GB", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"), ("A100 PCIe 80GB", "a100-pcie"),
     ("TPU v5litepod-16", "tpu-v5e"), ("RTX 3080 Ti", "rtx-3080-ti"), ("RTX 4070 Ti", "rtx-4070-ti"), ("RTX 4070", "rtx-4070"), ("Gaudi2", "gaudi2")],
)  # fmt: skip
def test_a_device_has_its_own_data_sheet(said: str, sheet: str | None) -> None:
    found = machine_of({"gpu": said, "gpus": "1"})
    assert (found and found.device.name) == (sheet and Machine.from_name(sheet).device.name)


@pytest.mark.parametrize(
    ("model", "flops", "millions"),
    [("resnet18", 3.6e9, 11.7), ("wide_resnet50_2", 22.8e9, 68.9), ("resnext101_32x8d", 32.8e9, 88.8), ("efficientnet_b0", 0.78e9, 5.3),
     ("convnext_base", 30.8e9, 88.6), ("swin_base_patch4_window7_224", 30.8e9, 87.8), ("vit_large_patch16_384", 382e9, 304.7),
     ("densenet121", 5.7e9, 8.0), ("mobilenet_v2", 0.6e9, 3.5)],
)  # fmt: skip
def test_vision_models_have_their_published_size(model: str, flops: float, millions: float) -> None:
    """Operations (two per multiply-add) and weights from torchvision's and timm's tables."""
    work = run_of({"model": model, "gpu": "A100", "gpus": "1", "micro_batch": "1", "source": "", "note": "", "precision": "bf16"}).work
    assert work is not None and work.flops == pytest.approx(flops, rel=0.15)
    assert sum(b.weights * b.count for b in work.blocks) / 1e6 == pytest.approx(millions, rel=0.12)


def test_what_a_row_says_of_its_software() -> None:
    row = {"model": "Llama 2 7B", "gpu": "RTX 4090", "gpus": "8", "micro_batch": "1", "seq_len": "2048", "source": "", "precision": "bf16"}
    plain, lora, four = (run_of(row | {"note": note}) for note in ("DDP", "FSDP, LoRA", "QLoRA nf4, channels last"))
    assert (plain.lora, lora.lora, lora.quantized, four.quantized) == (False, True, False, True) and four.stack.channels_last
    assert [plan.dp for plan, *_ in plain.plans] == [8] * len(plain.plans) and {plan.fsdp for plan, *_ in lora.plans} == {8}
    ring, heads = (run_of(row | {"note": note, "cp": "8"}).plans[0][0].cp_method for note in ("", "Ulysses"))
    assert (ring, heads) == ("ring", "ulysses")


def test_a_mixture_whose_exchange_is_not_printed_may_have_any() -> None:
    row = ROW | {"model": "GPT-OSS 20B", "layers": "", "hidden": "", "tp": "1", "dp": "16"}
    assert {plan.ep for plan, *_ in run_of(row).plans} == {1, 2, 4, 8, 16} and {plan.ep for plan, *_ in run_of(row | {"ep": "8"}).plans} == {8}
    assert {plan.ep for plan, *_ in run_of(ROW).plans} == {1}, "a model without experts"


def test_a_table_of_offloaded_runs_says_it_once() -> None:
    row = ROW | {"note": "", "table_or_file": "HF + Deepspeed Zero 3 + Full Offload", "fsdp_or_zero_stage": "3", "tp": "1", "dp": "16"}
    assert {plan.offload for plan, *_ in run_of(row).plans} == {"all"}
    assert {plan.offload for plan, *_ in run_of(row | {"note": "optimizer offload Y param offload N"}).plans} == {"optimizer"}


def test_megatron_deepspeed_shards_its_optimizer() -> None:
    row = ROW | {"note": "Megatron-DeepSpeed", "micro_batch": "2", "precision": "fp16"}
    assert {(plan.zero_stage, plan.fsdp) for plan, *_ in run_of(row).plans} == {(1, 8)}


@pytest.mark.prove
def test_a_measured_time_never_reaches_its_own_prediction(tmp_path: Path) -> None:
    """A measurement twice as long, and the same prediction: the measured time is not used."""

    def predicted(seconds: str) -> float:
        file = tmp_path / "runs.csv"
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(ROW))
            writer.writeheader()
            writer.writerow(ROW | {"measured_iter_time_s": seconds})
        found = json.loads(subprocess.run([sys.executable, BENCH / "planner.py", "--runs", file, "--json"],
                                          capture_output=True, text=True, check=True).stdout)  # fmt: skip
        return found["worst"][0]["ratio"] * float(seconds)

    assert predicted("1.0") == pytest.approx(predicted("2.0"), abs=0.02)


@pytest.mark.slow
def test_the_planner_is_as_good_as_its_docs_say() -> None:
    done = subprocess.run([sys.executable, BENCH / "planner.py", "--json"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    node = found["sources"]["VIA-Research/vTrain"]
    assert node["mape"] <= 12 and node["choice"]["spearman"] >= 0.8 and node["choice"]["regret"] <= 1.04
    assert found["expressed_percent"] >= 85 and found["overall"]["mean_of_sources"] <= 16
    assert 85 <= found["overall"]["inside_90"] <= 98 and found["choice"]["pairs_10"] >= 82 and found["choice"]["regret"] <= 1.04
    for rival in found["rivals"].values():
        assert rival["mape"] > found["overall"]["mape"] and rival["choice"]["regret"] > found["choice"]["regret"]
    assert len(found["worst"]) == 10
    memory = found["memory"]
    ran = memory["said_fits"] - memory["false_fits"] + memory["ran_but_refused"]
    assert memory["mape"] <= 20 and memory["false_fits"] <= memory["said_fits"] / 20 and memory["ran_but_refused"] <= ran / 20


@pytest.mark.prove
def test_four_measured_rows_help() -> None:
    done = subprocess.run([sys.executable, BENCH / "planner.py", "--anchors", "4", "--json"],
                          capture_output=True, text=True, check=True)  # fmt: skip
    overall = json.loads(done.stdout)["overall"]
    assert overall["mean_of_sources"] <= 12 and 85 <= overall["inside_90"] <= 98
