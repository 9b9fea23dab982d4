"""Training from given weights: under every plan, sharded, with frozen parameters that checkpoints reference without storing them."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest
import torch
from rarely import rarely, sampled
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import plait
from plait import Engine, Job, PlaitError, Plan
from plait.checkpoint.manifest import read_manifest, seal_json, unseal_json
from plait.cli.main import main
from plait.launch import fork

FROZEN = {"0.base_layer.weight", "0.base_layer.bias", "2.base_layer.weight", "2.base_layer.bias"}


class Adapted(nn.Module):
    """A frozen linear layer, plus a product of two small matrices."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def adapted() -> nn.Module:
    model = nn.Sequential(Adapted(6, 16), nn.Tanh(), Adapted(16, 16), nn.Tanh(), nn.Linear(16, 1))
    return model.double()


class Doubles(jobs.Numbers):
    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return x.double(), y.double()


def job(base: Path, model: Any = adapted) -> Job:
    return Job(
        model=model, loss=nn.functional.mse_loss, data=Doubles, optimizer=lambda p: torch.optim.AdamW(p, 1e-2), batch=8,
        steps=6, weights=str(base),
    )  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(77)
    save_file(plain().state_dict(), tmp_path / "base.safetensors")
    return tmp_path / "base.safetensors"


def quietly(work: Any, ranks: int) -> list[Any]:
    return fork.run_ranks(work, ranks, fork.Listener(lambda *_: None))


def trained(
    job: Job, plan: str, folder: Path, steps: int, resume: bool = False, save: bool = False
) -> dict[str, Tensor]:
    """The weights after some steps, gathered from every rank's own parts."""
    parsed = Plan.parse(plan)

    def rank(place: Any) -> Any:
        engine = Engine(
            job, parsed, device="cpu", place=place, directory=folder / "checkpoints", read_weights=not resume
        )
        if resume:
            engine.resume()
        for batch in engine.batches():
            engine.step(batch)
            if engine.position.step == steps:
                break
        if save:
            engine.save()
        parts = engine.rank_model.get_parts()
        save_file({n: p.tensor.contiguous() for n, p in parts.items()}, folder / f"part-{place.rank}.safetensors")
        return {n: [p.shape, p.ranges] for n, p in parts.items()}

    whole = dict[str, Tensor]()
    for k, layout in enumerate(quietly(rank, parsed.world)):
        for name, tensor in load_file(folder / f"part-{k}.safetensors").items():
            shape, ranges = layout[name]
            target = whole.setdefault(name, torch.full(tuple(shape), torch.nan, dtype=tensor.dtype))
            target[tuple(slice(r[0][0], r[0][0] + r[0][1]) for r in ranges)] = tensor
    return whole


def near(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[n], b[n], rtol=1e-10, atol=1e-12) for n in a)


PLANS = ("dp=2", "fsdp=2", "tp=2", "pp=2", "fsdp=2 microbatches=2", "dp=2 fsdp=2")


@pytest.mark.parametrize("plan", ("fsdp=2", "pp=2", *rarely(*(p for p in PLANS if p not in ("fsdp=2", "pp=2")))))
def test_checkpoints_hold_what_is_trained_and_every_plan_goes_on(base: Path, tmp_path: Path, plan: str) -> None:
    alone = trained(job(base), "dp=1", tmp_path, 6)
    trained(job(base), plan, tmp_path, 3, save=True)
    manifest = read_manifest(tmp_path / "checkpoints/step-000003")
    assert manifest.base is not None and set(manifest.base.tensors) == FROZEN
    assert not {f"model/{name}" for name in FROZEN} & set(manifest.tensors)
    other = PLANS[(PLANS.index(plan) + 1) % 4]
    assert near(trained(job(base), other, tmp_path, 6, resume=True), alone)
    assert all(torch.equal(alone[n], load_file(base)[n.replace(".base_layer", "")]) for n in FROZEN)


def refused(work: Any) -> PlaitError:
    with pytest.raises(PlaitError) as caught:
        work()
    return caught.value


def test_another_base_is_refused(base: Path, tmp_path: Path, capfd: Any) -> None:
    trained(job(base), "dp=1", tmp_path, 2, save=True)
    moved = base.rename(tmp_path / "moved.safetensors")
    fine = trained(job(moved), "dp=1", tmp_path, 4, resume=True)
    assert near(fine, trained(job(moved), "dp=1", tmp_path, 4)), "the path may be another"
    out = ["checkpoint", "export", str(tmp_path / "checkpoints"), "--output"]
    assert main([*out, str(tmp_path / "a.safetensors")]) == 2
    assert "error[K020]" in capfd.readouterr().err
    assert main([*out, str(tmp_path / "a.safetensors"), "--base", str(moved)]) == 0
    whole = load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(whole[n], fine[n]) for n in FROZEN) and whole.keys() == fine.keys()
    assert main(["checkpoint", "info", str(tmp_path / "checkpoints"), "--json"]) == 0
    assert "4 frozen tensors of" in json.loads(capfd.readouterr().out.splitlines()[-1])["base"]
    changed = load_file(moved)
    changed["0.weight"][0, 0] += 1
    save_file(changed, tmp_path / "other.safetensors")
    for plan in ("dp=1", "fsdp=2"):
        error = refused(lambda plan=plan: trained(job(tmp_path / "other.safetensors"), plan, tmp_path, 4, resume=True))
        assert error.codes == ["K020"], error


def test_a_checkpoint_with_a_base_is_weights_too(base: Path, tmp_path: Path) -> None:
    first = trained(job(base), "dp=1", tmp_path, 3, save=True)
    engine = Engine(dataclasses.replace(job(base), weights=str(tmp_path / "checkpoints")), "dp=1", device="cpu")
    assert all(torch.equal(t, first[n]) for n, t in engine.model.state_dict().items())


def test_without_frozen_parameters_nothing_is_left_out(base: Path, tmp_path: Path) -> None:
    trained(job(base, plain), "dp=1", tmp_path, 1, save=True)
    assert read_manifest(tmp_path / "checkpoints/step-000001").base is None


def test_a_new_head_is_declared(base: Path, tmp_path: Path) -> None:
    weights = {name: tensor for name, tensor in load_file(base).items() if not name.startswith("4.")}
    save_file({**weights, "old_head.weight": torch.zeros(3)}, base)
    error = refused(lambda: Engine(job(base, plain), "dp=1", device="cpu"))
    assert error.codes == ["K008", "K008"] and 'plait.new_modules(model, "4")' in error.problems[0].fix[1]
    declared = job(base, lambda: plait.new_modules(plain(), "4", unused=("old_head",)))
    model = Engine(declared, "dp=1", device="cpu").model
    torch.manual_seed(0)
    drawn = plain().state_dict()
    assert torch.equal(model.state_dict()["4.weight"], drawn["4.weight"]), "it keeps what its constructor drew"
    assert torch.equal(model.state_dict()["0.weight"], weights["0.weight"])


def test_a_dry_run_a_sketch_and_a_plan_do_not_read_weights(tmp_path: Path) -> None:
    from plait.planner.dryrun.dry_run import trace_first_step

    nowhere = job(tmp_path / "nowhere.safetensors")
    assert len(trace_first_step(nowhere, Plan.parse("fsdp=2"))) == 2 and plait.sketch_of(nowhere).units
    error = refused(lambda: Engine(nowhere, "dp=1", device="cpu"))
    assert error.codes == ["K007"]


@pytest.mark.parametrize("plan", sampled(3, ("dp=2", "fsdp=2", "fsdp=2 zero_stage=1")))
def test_frozen_parameters_have_no_gradient_no_state_and_no_traffic(plan: str, tmp_path: Path) -> None:
    """With fully sharded frozen parameters, a step sends additional gathered halves of them. With replicas it sends nothing more."""
    from plait.planner.dryrun.dry_run import dry_run, trace_first_step

    def wide(frozen: int) -> Any:
        def model() -> nn.Module:
            layer = nn.Linear(16, frozen, bias=False).requires_grad_(False)
            made = nn.Sequential(nn.Linear(6, 16), layer, nn.Linear(frozen, 1, bias=False)).double()
            made[2].requires_grad_(False)
            return made

        return dataclasses.replace(job(tmp_path, model), weights=None)

    parsed, halves = Plan.parse(plan), (32 * 16 // 2 + 32) * 8  # the last layer's single row cannot be halved
    sent = [sum(n for _, n in trace_first_step(wide(n), parsed)[0].totals.values()) for n in (32, 64)]
    assert (sent[1] - sent[0]) % halves == 0 and (sent[1] - sent[0] == 0) is (plan == "dp=2"), sent
    kinds = [dry_run(wide(n), parsed).kinds[0].peak.categories for n in (32, 64)]
    assert kinds[0]["optimizer"] == kinds[1]["optimizer"] and kinds[0].get("gradients") == kinds[1].get("gradients")


def test_the_planner_prices_gradients_of_what_is_trained_alone(base: Path) -> None:
    from plait.parallel.apply_order import make_shard_plan
    from plait.planner.formulas import RuntimeCosts
    from plait.planner.sync_costs import sum_sent_bytes
    from plait.planner.workload import build_workload

    sketch = plait.sketch_of(job(base))
    work = build_workload(sketch, make_shard_plan(job(base), Plan(), sketch))
    assert work.weights == 384 + 125 and work.frozen == pytest.approx(384 / 509)
    found = sum_sent_bytes(SimpleNamespace(software=RuntimeCosts(), work=work), Plan.parse("fsdp=2"), work.weights)  # pyrefly: ignore
    assert found["fsdp"] == pytest.approx((509 * 8 + 125 * 4) / 2), (
        "gathered twice, and the gradients of what is trained"
    )


class Quantised(Tensor):
    """A tensor whose values are stored elsewhere, like those of quantization libraries."""

    def __tensor_flatten__(self) -> Any:
        return ["packed"], None


def test_a_tensor_of_a_quantisation_library_is_refused(base: Path) -> None:
    def model() -> nn.Module:
        made = adapted()
        made[0].base_layer.weight = nn.Parameter(
            made[0].base_layer.weight.data.as_subclass(Quantised), requires_grad=False
        )
        return made

    error = refused(lambda: Engine(job(base, model), "dp=1", device="cpu"))
    assert error.codes == ["K023"] and "0.base_layer.weight is a" in str(error) and "plain integer" in str(error)


@pytest.mark.parametrize("lie, word", [
    (["nowhere", "F64", [16, 6]], "the base has no such tensor"),
    (["2.weight", "F64", [16, 6]], "F64 [16, 16]"),
    (["0.weight", "I64", [16, 6]], "F64 [16, 6]"),
])  # fmt: skip
def test_a_manifest_that_points_to_what_the_base_has_not_is_refused(
    base: Path, tmp_path: Path, capfd: Any, lie: list[Any], word: str
) -> None:
    trained(job(base), "dp=1", tmp_path, 2, save=True)
    (file,) = (tmp_path / "checkpoints").glob("step-*/manifest.json")
    said = unseal_json(file.read_bytes())
    said["base"]["tensors"]["0.base_layer.weight"] = lie
    file.write_bytes(seal_json(said))
    to = str(tmp_path / "a.safetensors")
    assert main(["checkpoint", "export", str(tmp_path / "checkpoints"), "--output", to]) == 2
    found = capfd.readouterr().err
    assert "error[K020]" in found and word in found and "0.base_layer.weight" in found and not Path(to).exists()
    for plan in ("dp=1", "fsdp=2"):
        error = refused(lambda plan=plan: trained(job(base), plan, tmp_path, 4, resume=True))
        assert error.codes[0] in ("K020", "K003") and "0.base_layer.weight" in str(error), error
