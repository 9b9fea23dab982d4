"""fp8: linear layers are torchao's, a step equals one device in fp8 under each plan, and unsupported plans are rejected."""

import dataclasses
import importlib.util
from typing import Any

import jobs_fp8
import pytest
import torch
import torch.distributed as dist
from rarely import rarely
from torch import Tensor, nn

from plait.config.conflicts import find_ineffective_keys
from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.engine.build import check_plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.parallel import fp8
from plait.proof.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's


def test_the_layers_that_compute_in_fp8() -> None:
    """All linear layers except the first, the last, those tied to an embedding, and those whose sizes fp8 units do not support."""
    model = jobs_fp8.GPT()
    inner = tuple(f"blocks.{i}.{name}" for i in range(2) for name in ("qkv", "out", "up", "down"))
    assert fp8.choose_layers(model) == inner
    model.blocks[0].up, model.blocks[1].out.weight = nn.Linear(32, 100), model.embed.weight
    assert set(inner) - set(fp8.choose_layers(model)) == {"blocks.0.up", "blocks.1.out"}


def of_layers(place: Place, recipe: str) -> dict[str, Any]:
    engine = Engine(jobs_fp8.gpt(), Plan.parse(f"precision=fp8 fp8_recipe={recipe}"), place=place)
    layer = engine.model.blocks[0].up
    engine.step(next(engine.batches()))
    x = torch.randn(5, 32)
    with torch.autocast("cpu", torch.bfloat16):
        y, none = layer(x), layer(x[:0])
    near = torch.nn.functional.linear(x, layer.weight, layer.bias)
    kinds = [name for name, m in engine.model.named_modules() if "Fp8" in type(m).__name__]
    return {
        "kinds": kinds, "off": float((y.float() - near).norm() / near.norm()), "dtype": str(y.dtype), "none": tuple(none.shape),
        "weights": sorted({str(p.dtype) for p in engine.model.parameters()}), "names": [n for n, _ in engine.model.named_parameters()],
    }  # fmt: skip


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise"))
def test_products_are_rounded_to_eight_bits_and_weights_are_not(recipe: str) -> None:
    (found,) = fork.run_ranks(lambda place: of_layers(place, recipe), 1)
    assert tuple(found["kinds"]) == fp8.choose_layers(jobs_fp8.GPT())
    assert 2**-7 < found["off"] < 2**-3, "further than bf16 rounds, as near as fp8 does"
    assert (
        found["dtype"] == "torch.bfloat16"
        and tuple(found["none"]) == (0, 128)
        and found["weights"] == ["torch.float32"]
    )
    assert found["names"] == [name for name, _ in jobs_fp8.GPT().named_parameters()]


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise"))
def test_rows_that_fp8_units_do_not_fit_are_filled_up(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8 units sum over multiples of 16 and need a multiple of 16 columns. Backward sums over rows, of which any number is allowed."""

    def scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Any = None, out_dtype: Any = None, **_: Any) -> Tensor:
        assert a.shape[1] % 16 == b.shape[1] % 16 == 0, f"{tuple(a.shape)} times {tuple(b.shape)}"
        assert a.stride(1) == b.stride(0) == 1, "rows times columns"
        product = (a.float() * scale_a) @ (b.float() * scale_b)
        return (product if bias is None else product + bias).to(out_dtype)

    found = {}
    for emulated in (True, False):
        torch.manual_seed(0)
        model = jobs_fp8.GPT()
        fp8.convert_layers(model, fp8.choose_layers(model), recipe, emulated)
        if not emulated:
            monkeypatch.setattr(torch, "_scaled_mm", scaled)
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.arange(5)[None]).float().square().mean().backward()
        found[emulated] = [p.grad for p in model.parameters() if p.grad is not None]
    far = [float((a - b).norm() / a.norm().clamp(min=1e-9)) for a, b in zip(found[True], found[False], strict=True)]
    assert max(far) < 0.05, far


def test_slices_that_fp8_units_do_not_fit_stay_in_bf16() -> None:
    model = jobs_fp8.GPT(width=48)
    assert fp8.choose_layers(model, 3) == fp8.choose_layers(model) != () and "blocks.0.out" not in fp8.choose_layers(model, 2)


def losses(place: Place, plan: str) -> dict[str, Any]:
    engine = Engine(jobs_fp8.gpt(), Plan.parse(plan), place=place)
    return {"losses": [engine.step(batch).loss for batch in engine.batches()]}


def test_fp8_follows_fp32() -> None:
    full, eight = (fork.run_ranks(lambda place, p=p: losses(place, p), 1)[0]["losses"] for p in ("dp=1", "precision=fp8"))
    assert all(abs(a - b) < 0.02 * a for a, b in zip(full, eight)) and full != eight


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize(
    "plan",
    (
        "dp=2", "tp=2", "fsdp=2 fp8_recipe=rowwise",
        *rarely("fsdp=2", "cp=2", "pp=2 microbatches=2 schedule=zb", "tp=2 fp8_recipe=rowwise", "dp=2 activation_checkpointing=full microbatches=2",
                "fsdp=2 tp=2", "cp=2 cp_method=ulysses fp8_recipe=rowwise"),
    ),
)  # fmt: skip
def test_a_step_in_fp8_is_that_of_one_device_in_fp8(plan: str) -> None:
    verdict = verify(jobs_fp8.gpt(), Plan.parse(f"{plan} precision=fp8"), steps=2, device="cpu")
    assert verdict.equal, str(verdict)
    assert {"F", "F2"} <= {p.code for p in verdict.probes}, "the step in fp8 was compared"
    shared = any(key in plan for key in ("tp", "cp", "pp"))
    assert shared or "rounding alone" not in str(verdict), "ranks multiply what one device does, under the same scales"
    assert any("fp8 rounds differently from fp32" in note for note in verdict.inexact), verdict.inexact


@pytest.mark.slow
@pytest.mark.whole
def test_one_rank_in_bf16_is_one_device_in_bf16() -> None:
    """With the same number of threads: with more threads, torch's norms accumulate in different formats."""
    verdict = verify(jobs_fp8.gpt(), Plan.parse("precision=bf16"), steps=1, device="cpu")
    assert verdict.equal, str(verdict)


@pytest.mark.slow
@pytest.mark.whole
def test_a_sum_in_sixteen_bits_is_seen_under_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dist.all_reduce

    def rounded(t: Tensor, *args: Any, **more: Any) -> Any:
        if t.dtype == torch.float32 and t.numel() > 8:
            with torch.no_grad():
                t.copy_(t.bfloat16())
        return real(t, *args, **more)

    monkeypatch.setattr(dist, "all_reduce", rounded)
    verdict = verify(jobs_fp8.gpt(), Plan.parse("dp=2 precision=fp8"), steps=2, device="cpu")
    assert not verdict.equal and verdict.code in ("V023", "V025"), str(verdict)


def test_without_torchao_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlaitError, match="H013"):
        check_plan(jobs_fp8.gpt(), Plan.parse("precision=fp8"), "cpu")


def test_a_gpu_without_units_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(PlaitError, match=r"its compute capability is 8\.0, fp8 needs 8\.9"):
        fp8.check_device(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    fp8.check_device(torch.device("cuda", 0))


def test_a_model_without_a_layer_that_fits_is_refused() -> None:
    job = dataclasses.replace(jobs_fp8.gpt(), model=lambda: jobs_fp8.GPT(width=24))
    with pytest.raises(PlaitError, match="no effect on this model") as refused:
        Engine(job, Plan.parse("precision=fp8"), place=Place(0, 1), device="cpu")
    assert refused.value.problems[0].code == "P030"
    with pytest.raises(PlaitError, match=r"multiples of 32 \(tp=2"):
        fp8.require_layers(jobs_fp8.GPT(width=48), 2)


def test_a_recipe_without_fp8_has_no_effect() -> None:
    (problem,) = find_ineffective_keys(Plan.parse("precision=bf16 fp8_recipe=rowwise"))
    assert problem.code == "P030" and "precision=fp8" in problem.what
