"""`shard_over_cp=true`: FSDP shards over fsdp × cp ranks. The training equals one device's, and a rank stores 1/(F·C) of the states."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import jobs_context
import jobs_odd
import jobs_phased
import jobs_pipeline
import jobs_real
import pytest
import torch
from exact.test_context import _Attending
from faulty import sees
from rarely import rarely, sampled
from run.test_resume_sharded import losses
from saved import read_checkpoint_tensors

from plait.cli.plan_tables import build_parameter_table
from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.engine.build import check_plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.parallel import spec
from plait.parallel.apply_order import make_shard_plan
from plait.parallel.fsdp import strategy as fsdp
from plait.parallel.fsdp.runtime import ShardScatter
from plait.parallel.gradient_reducer import GradientReducer
from plait.parallel.mesh import Mesh
from plait.planner.dryrun.dry_run import dry_run, sketch_weights
from plait.proof.verify import verify


def attending() -> Job:
    return jobs_odd.job(lambda: _Attending(False), "seq")


def optimized_by(optimizer: Any) -> Job:
    return replace(jobs_real.gpt(), optimizer=optimizer)


def partly_trained() -> Job:
    """Frozen parameters, an unused module and an unused scalar."""
    plain = jobs_real.gpt()

    def model() -> torch.nn.Module:
        made = plain.model()
        for name, parameter in made.named_parameters():
            parameter.requires_grad_("mlp" not in name)
        made.unused, made.scalar = torch.nn.Linear(5, 3), torch.nn.Parameter(torch.tensor(0.5))
        return made

    return replace(plain, model=model)


MODELS: dict[str, Any] = {
    "gpt": jobs_real.gpt, "llama": jobs_real.llama, "t5": jobs_pipeline.t5, "lstm": jobs_context.OWN["lstm"], "attending": attending,
    "bert": jobs_context.bert, "tied": jobs_real.gpt2, "biased": jobs_context.OWN["biased"], "checkpoint": jobs_context.OWN["checkpoint"],
}  # fmt: skip
PLANS = (
    "cp=2", "fsdp=2 cp=2", "fsdp=2 cp=2 zero_stage=1 microbatches=2", "fsdp=2 cp=2 zero_stage=2 cp_method=ulysses", "dp=2 cp=2 microbatches=2",
    "tp=2 cp=2", "pp=2 cp=2 microbatches=2", "cp=2 cp_method=ulysses zero_stage=1", "cp=3 zero_stage=2 activation_checkpointing=full",
)  # fmt: skip
BESIDE = (
    ("gpt", "cp=2 offload=all microbatches=2"), ("gpt", "dp=2 cp=2 offload=optimizer"),
    ("gpt", "fsdp=2 cp=2 tp=2 microbatches=2"), ("gpt", "pp=2 cp=2 microbatches=2 schedule=zb zero_stage=2"),
    ("gpt", "replica_groups=2 cp=2 outer_sync=diloco sync_every=2"), ("gpt", "fsdp=2 cp=2 batch_split=2:1"), ("gpt", "cp=2 precision=bf16"),
    ("muon", "fsdp=2 cp=2"), ("adafactor", "cp=2 tp=2"), ("partly_trained", "fsdp=2 cp=2"), ("unbalanced", "dp=2 ep=2 cp=2"),
    ("balanced", "fsdp=4 ep=2 cp=2"),
)  # fmt: skip
OTHERS = jobs_context.EXPERTS | {
    "muon": lambda: optimized_by(lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], 1e-2)),
    "adafactor": lambda: optimized_by(lambda p: torch.optim.Adafactor(p, 1e-2)), "partly_trained": partly_trained,
}  # fmt: skip
QUICK = (("lstm", "cp=2"), ("attending", "fsdp=2 cp=2 cp_method=ulysses"), ("attending", "dp=2 cp=2 zero_stage=1 microbatches=2"))
SLOW = (("attending", "fsdp=2 cp=2 zero_stage=2 cp_method=ulysses"), ("attending", "tp=2 cp=2"), ("lstm", "fsdp=2 cp=2 zero_stage=1 microbatches=2"))
LONG = [(name, plan) for name in MODELS for plan in PLANS] + [*BESIDE]


def over_cp(words: str) -> Plan:
    return Plan.parse(f"{words} shard_over_cp=true")


def equal(name: str, words: str) -> None:
    try:
        verdict = verify((MODELS | OTHERS)[name](), over_cp(words), steps=3)
    except PlaitError as error:
        assert error.codes == ["P042"] and name == "t5" and "cp=3" in words, error  # a ring of three needs longer sequences
        return
    assert verdict.equal, verdict.to_dict()


@pytest.mark.parametrize("name, words", QUICK)
def test_equal(name: str, words: str) -> None:
    equal(name, words)


@pytest.mark.slow
@pytest.mark.parametrize("name, words", SLOW)
def test_equal_in_more_cases(name: str, words: str) -> None:
    equal(name, words)


@pytest.mark.prove
@pytest.mark.parametrize("name, words", [one for one in LONG if one not in SLOW])
def test_equal_in_every_case(name: str, words: str) -> None:
    equal(name, words)


# — which states a rank stores —


@pytest.mark.parametrize("words, ranks", [("cp=2", 2), ("cp=4", 4), ("fsdp=2 cp=2", 4), ("dp=2 fsdp=2 cp=2", 4), ("fsdp=2 cp=2 zero_stage=1", 4)])
def test_a_rank_keeps_its_part_of_a_shard_of_fsdp_times_cp(words: str, ranks: int) -> None:
    """It is the part for an `fsdp` of F·C ranks, and each part is on as many ranks as dp has replicas."""
    job, plan = jobs_real.gpt(), over_cp(words)
    table, fully = (make_shard_plan(job, each, sketch_weights(job, each)[0]) for each in (plan, Plan(fsdp=ranks)))
    for rank in range(plan.devices):
        at = Mesh(plan, rank).coordinates
        number = at["fsdp"] * plan.cp + at["cp"]
        assert table.count_bytes(at) == fully.count_bytes(Mesh(fully.plan, number).coordinates)
        for name, row in table.specs.items():
            assert row.buffer or row.ranges(at) == fully.specs[name].ranges(Mesh(fully.plan, number).coordinates)
            assert row.buffer or table.count_replicas(name, at) == plan.dp


def test_the_dry_run_finds_a_share_of_the_states() -> None:
    found = {}
    for words in ("cp=2", "cp=2 shard_over_cp=true", "fsdp=2 cp=2 shard_over_cp=true"):
        peaks = [kind.peak.categories for kind in dry_run(attending(), Plan.parse(words)).kinds]
        found[words] = [max(peak["parameters"] for peak in peaks), max(peak["optimizer"] for peak in peaks)]
    whole, halves, quarters = found.values()
    for all_of_it, half, quarter in zip(whole, halves, quarters):
        assert 0.5 <= half / all_of_it < 0.56 and 0.25 <= quarter / all_of_it < 0.32, found


def test_the_table_names_the_axes() -> None:
    rows = build_parameter_table(jobs_real.gpt(), over_cp("fsdp=2 cp=2")).rows
    assert {row.split for row in rows} == {("dim 0 by fsdp × cp",)}
    assert {row.gradient for row in rows} == {("scatter over fsdp × cp",)}
    assert all(prod(row.on_ranks[0]) <= prod(row.shape) / 4 + prod(row.shape[1:]) for row in rows)
    (row, *_) = build_parameter_table(jobs_real.gpt(), over_cp("dp=2 cp=2")).rows
    assert row.split == ("dim 0 by cp",) and row.gradient == ("scatter over cp", "sum over dp")


# — checkpoints —


CHAIN = ("cp=2", "dp=2", "fsdp=2 cp=2 zero_stage=1", "tp=2", "dp=2 cp=2 microbatches=2", "fsdp=4", "cp=2 tp=2", "dp=1")
"""Plans; those with cp shard over it."""


def words_of(plan: str) -> str:
    return str(over_cp(plan)) if "cp" in plan else plan


@pytest.mark.slow
@pytest.mark.parametrize("name, plans", [("attending", CHAIN[:4]), *rarely(("gpt", CHAIN), ("llama", CHAIN[1:4]))])
def test_resumed_under_other_plans(name: str, plans: tuple[str, ...], tmp_path: Path) -> None:
    alone = [loss for _ in plans for loss in losses(MODELS[name](), "dp=1", tmp_path / "whole")]
    found = [loss for plan in plans for loss in losses(MODELS[name](), words_of(plan), tmp_path / "parts")]
    assert found == pytest.approx(alone, rel=1e-9)


def saved_anew(plan: str, read: Path, written: Path) -> dict[str, torch.Tensor]:
    """A checkpoint written into a folder right after another one was read, or after one step if there is none."""

    def run(place: Place) -> dict[str, str]:
        with Engine(replace(attending(), steps=100), words_of(plan), place=place, directory=read, device="cpu") as engine:
            if engine.resume(missing_ok=True) is None:
                engine.step(next(engine.batches()))
            engine.checkpoints.directory = written
            return {"path": str(engine.save())}

    written.mkdir(exist_ok=True)
    return read_checkpoint_tensors(Path(fork.run_ranks(run, over_cp(plan).world)[0]["path"]))


def test_a_checkpoint_is_the_same_under_other_plans(tmp_path: Path) -> None:
    """Bit for bit: written as shards over cp and read under other plans, and the reverse."""
    folders, found = [tmp_path / str(k) for k in range(5)], []
    for k, plan in enumerate(("fsdp=2 cp=2", "dp=1", "cp=3 zero_stage=1", "fsdp=2")):
        found.append(saved_anew(plan, folders[k], folders[k + 1]))
    first, *others = found
    assert any(name.startswith("optimizer/") for name in first)
    for other in others:
        assert other.keys() == first.keys() and all(torch.equal(other[name], tensor) for name, tensor in first.items())


# — faults —


def whole_sum_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ShardScatter.reduce_open

    def settle(self: Any) -> None:
        opened = self.open_sum
        real(self)
        if opened is not None:
            opened[1].div_(2)

    monkeypatch.setattr(ShardScatter, "reduce_open", settle)


def own_part_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a rank's own sequence shard is missing."""
    real = ShardScatter.reduce_open

    def settle(self: Any) -> None:
        if self.open_sum is not None:
            works, output, parts, copies = self.open_sum
            self.open_sum = works, output, parts[1:], copies
        real(self)

    monkeypatch.setattr(ShardScatter, "reduce_open", settle)


def replicas_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "ShardScatter", lambda copies: ShardScatter(None))


def clipped_by_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = lambda self: torch.nn.utils.get_total_norm([p.grad for p in self.own.values() if p.grad.numel()])  # noqa: E731
    monkeypatch.setattr(GradientReducer, "get_norm", norm)


def counted_once_for_each_rank_of_cp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm treats the ranks of cp as replicas, as they are without the key."""
    real = spec.ShardPlan.count_replicas
    monkeypatch.setattr(spec.ShardPlan, "count_replicas", lambda self, name, at: real(self, name, at) * self.plan.cp)


def numbered_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table swaps the ranks of two shards: fsdp = 0, cp = 1 and fsdp = 1, cp = 0."""
    real = spec.compute_index
    monkeypatch.setattr(spec, "compute_index", lambda at, sizes: real(at, dict(reversed(sizes.items()))))


@pytest.mark.parametrize("fault, words, probe, codes", sampled(3, [
    (whole_sum_halved, "cp=2", "G", ("V002",)), (own_part_left_out, "cp=2", "G", ()), (replicas_not_summed, "dp=2 cp=2", "R", ("V004",)),
    (clipped_by_a_part, "cp=2", "U2", ("V007",)), (counted_once_for_each_rank_of_cp, "fsdp=2 cp=2", "U2", ("V007",)),
    (numbered_the_other_way, "fsdp=2 cp=2", "I", ()),
]), ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_a_fault_is_seen(fault: Any, words: str, probe: str, codes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    sees(attending(), str(over_cp(words)), probe, "", *codes)


# — rejected plans —


@pytest.mark.parametrize("words, code", [
    ("dp=2", "P030"), ("fsdp=2", "P030"), ("cp=2 dp=2 grad_compression=bf16", "P080"), ("replica_groups=2 cp=2 grad_compression=int8", "P080"),
    ("pp=2 cp=2 microbatches=2 schedule=zb", "P027"), ("cp=2 processes=one", "P041"), ("replica_groups=2 cp=2 outer_sync=async", "P060"),
])  # fmt: skip
def test_refused(words: str, code: str) -> None:
    with pytest.raises(PlaitError) as caught:
        check_plan(jobs_real.gpt(), over_cp(words))
    assert code in caught.value.codes and all(problem.fix for problem in caught.value.problems)


def test_phases_are_refused() -> None:
    with pytest.raises(PlaitError) as caught:
        check_plan(jobs_phased.wgan_gp(), over_cp("cp=2"))
    assert "P091" in caught.value.codes


def test_zero_says_what_is_sharded_over_cp_alone() -> None:
    check_plan(jobs_real.gpt(), over_cp("cp=2 zero_stage=1"))
    with pytest.raises(PlaitError, match="P030"):
        check_plan(jobs_real.gpt(), Plan.parse("cp=2 zero_stage=1"))
