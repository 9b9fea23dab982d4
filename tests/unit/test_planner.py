"""The planner: a condensed sketch, times and bytes of a plan, the search, and the printed answer."""

import json
from dataclasses import replace
from itertools import product
from math import exp, log, prod
from typing import Any

import jobs_real
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import plait
from plait.cli.main import main
from plait.cli.plan import answer_to_toml, explain_no_plan
from plait.cli.progress import BAR_WIDTH, ProgressLine, format_bar
from plait.config.errors import PlaitError
from plait.config.hardware import CORES_NOTE, Device, Matmuls, Rates
from plait.config.job import Job
from plait.config.machine import Machine
from plait.config.plan import Plan
from plait.config.plan_question import parse_size
from plait.engine.build import sketch_without_ranks
from plait.launch.detect import read_machine
from plait.parallel.apply_order import make_shard_plan
from plait.parallel.pipeline.schedule_search import build_table, simulate
from plait.planner import goals, plan_request
from plait.planner.answer import build_answer, describe_baseline, explain_choice, find_answer, format_answer
from plait.planner.constants import FITTED
from plait.planner.correction import NOISE, RunTraits, fit_correction
from plait.planner.dryrun.memory_table import make_memory_table
from plait.planner.estimate import StageSchedule, StageTimes, count_live, estimate_plan, time_optimizer, time_schedule
from plait.planner.formulas import CoreCosts, RuntimeCosts, TimeModel, count_rank_weights
from plait.planner.goals import add_baseline, list_device_counts
from plait.planner.plan_request import PlanRequest
from plait.planner.search import PREFERENCES, Candidate, SearchResult, compute_factors, find_best_plans
from plait.planner.search_space import count_branch_samples, iter_branches, list_shardings
from plait.planner.workload import Block, PlannedProduct, Workload


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = (t.view(b, s, 4, w // 4).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, w))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, layers: int, width: int):
        super().__init__()
        self.embed, self.head = nn.Embedding(512, width), nn.Linear(width, 512)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def leaving(size: float) -> float:
    """Memory of a device of which a plan may use this many bytes."""
    return (size + plan_request.CONTEXT_BYTES) / plan_request.USABLE_MEMORY


def job(layers: int = 4, width: int = 64, batch: int = 32, steps: int = 10) -> Job:
    return plait.Job(
        model=lambda: Model(layers, width),
        loss=lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()),
        data=lambda: [(torch.zeros(16, dtype=torch.long), torch.zeros(16, dtype=torch.long))] * 64,
        optimizer=lambda params: torch.optim.AdamW(params),
        batch=batch,
        steps=steps,
    )


@pytest.fixture(scope="module")
def asked() -> PlanRequest:
    return PlanRequest.from_job(job(), "gpt.py", Machine.from_name("h100x8"))


def test_a_sketch_is_boiled_down_to_what_its_formulas_say(asked: PlanRequest) -> None:
    work = asked.pace.work
    layer = next(b for b in work.blocks if b.count == 4)
    width, length = 64, 16
    maps = 2 * length * width * width * (3 + 1 + 4 + 4)
    assert sum(p.flops for p in layer.products) == maps + 2 * 2 * length * length * width  # both products of attention
    assert {p.cut for p in layer.products if p.weight} == {"columns", "inner"}
    assert all(p.cut == "batch" and p.fused for p in layer.products if not p.weight)
    assert layer.keys == 2 * length * width and layer.tp_sums == 2 and layer.out == length * width
    assert layer.weights == sum(p.numel() for p in Layer(64).parameters())
    assert work.weights == sum(p.numel() for p in Model(4, 64).parameters())
    assert asked.software == RuntimeCosts(4.0, 4.0, asked.software.state) and 8 <= asked.software.state < 8.1


def test_weights_that_two_units_share_are_counted_once() -> None:
    def tied() -> nn.Module:
        model = Model(2, 64)
        model.head.weight = model.embed.weight
        return model

    found = PlanRequest.from_job(replace(job(), model=tied), "tied", Machine.from_name("h100"), split=False).pace.work
    assert found.weights == sum(p.numel() for p in tied().parameters())


def test_parts_add_up_and_more_work_takes_longer(asked: PlanRequest) -> None:
    pace = asked.pace
    plain = estimate_plan(pace, Plan(), 8)
    assert plain.seconds == pytest.approx(sum(plain.parts.values()))
    again = estimate_plan(pace, Plan(activation_checkpointing="full"), 8)
    assert again.seconds > plain.seconds and again.memory["activations"] < plain.memory["activations"]
    twice = estimate_plan(pace, Plan(microbatches=2), 8)
    assert twice.seconds > plain.seconds and twice.memory["activations"] == plain.memory["activations"]
    shard = estimate_plan(pace, Plan(fsdp=8), 8)
    assert shard.memory["optimizer"] == pytest.approx(plain.memory["optimizer"] / 8)
    assert shard.memory["parameters"] == pytest.approx(plain.memory["parameters"] / 8)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_beyond_the_heads_of_keys_share_them(tp: int) -> None:
    """In a model with two heads of keys and values each of four ranks has one. Its weights and gradient reductions equal those in training."""
    llama = jobs_real.llama()
    pace = PlanRequest.from_job(llama, "llama.py", Machine.from_name("h100x8")).pace
    plan, at = Plan(tp=tp, sequence_parallel=False), {"tp": 0}
    table = make_shard_plan(llama, plan, sketch_without_ranks(llama, plan, torch.device("cpu")))
    assert 4 * sum(count_rank_weights(b, plan) * b.count for b in pace.work.blocks) == pytest.approx(table.count_bytes(at), rel=0.005)  # 31 words
    heads = [p for b in pace.work.blocks for p in b.products if p.head and p.count_columns(4) > p.columns / 4]
    assert len(heads) == 2, "keys and values"
    assert ("gradients" in estimate_plan(pace, plan, 4).parts) and (estimate_plan(pace, plan, 4).parts["gradients"] > 0) == (tp == 4)


def test_shards_over_cp_have_a_price_where_they_are_given(asked: PlanRequest) -> None:
    """The price of an equal number of fsdp shards, in bytes and in messages."""
    whole, over, fully = (estimate_plan(asked.pace, Plan.parse(words), 4) for words in ("cp=4", "cp=4 shard_over_cp=true", "fsdp=4"))
    for part in ("parameters", "gradients", "optimizer"):
        assert over.memory[part] == pytest.approx(whole.memory[part] / 4) == pytest.approx(fully.memory[part])
    assert over.sent_bytes == {"cp": pytest.approx(fully.sent_bytes["fsdp"])} and whole.sent_bytes == {}
    estimate = estimate_plan(asked.pace, Plan.parse("fsdp=2 cp=2 shard_over_cp=true"), 4)
    assert estimate.sent_bytes == {"fsdp×cp": pytest.approx(fully.sent_bytes["fsdp"])}
    for zero in (1, 3):
        found = find_answer(asked, {"cp": 8, "shard_over_cp": True, "zero_stage": zero})
        assert found.best is not None and (found.best.plan.shards, found.best.plan.zero_stage) == (8, zero)


@pytest.mark.parametrize("ep, left", [(2, 4), (4, 2), (8, 1), (16, 1)])
def test_experts_are_shared_by_the_ranks_that_ep_leaves(ep: int, left: int) -> None:
    """With fsdp=8 a rank has 1/8 of the non-expert weights, and 1/left of its 1/ep of the experts. It gathers the rest."""
    pace = TimeModel(Workload("mixture", (Block("layer", 4, (), 800.0, experts=64000.0),)), Machine.from_name("h100x8"))
    need = {zero: estimate_plan(pace, Plan(dp=2, fsdp=8, ep=ep, zero_stage=zero), 4).memory for zero in (1, 2, 3)}
    parts, whole = 4 * (800 / 8 + 64000 / ep / left), 4 * (800 + 64000 / ep)
    software = pace.software
    assert need[3]["parameters"] == pytest.approx(parts * software.weights)
    assert need[2]["parameters"] == need[1]["parameters"] == pytest.approx(whole * software.weights)
    assert need[2]["gradients"] == need[3]["gradients"] == pytest.approx(parts * software.gradients)
    assert need[1]["optimizer"] == need[3]["optimizer"] == pytest.approx(parts * software.state)
    assert need[3]["gathered"] == pytest.approx(
        3 * 4 * (800 + (64000 / ep if left > 1 else 0))
    )  # twice, and a gradient


def test_a_part_of_a_tile_takes_as_long_as_a_whole_one() -> None:
    """On a device. A CPU core has no tiles of that size."""
    seconds = lambda pace, columns: pace.time_product(PlannedProduct(1e5, 4096, columns), Plan(precision="bf16"), 1)  # noqa: E731
    device = TimeModel(Workload("", ()), Machine.from_name("h100"))
    assert seconds(device, 4040) == seconds(device, 4096) < seconds(device, 4097) == seconds(device, 4160)
    core = TimeModel(Workload("", ()), Machine.from_name("h100"), RuntimeCosts(cores=CoreCosts(1e-6)))
    assert seconds(core, 4040) < seconds(core, 4096)


def test_attention_goes_by_its_mask_and_the_generation_of_its_kernels() -> None:
    """A causal mask halves the work. Kernels written for an A100 reach less of a faster device's peak than kernels made for it."""

    def part(machine: str, causal: bool = True, **given: Any) -> float:
        pace = TimeModel(Workload("", ()), Machine.from_name(machine), RuntimeCosts(**given))
        product = PlannedProduct(65536, 128, 65536, 32, weight=False, fused=True, causal=causal)
        needed = product.flops / (2 if causal else 1)
        return needed / pace.time_product(product, Plan(precision="bf16"), 1) / pace.get_peak("bf16")

    assert part("a100", causal=False) == pytest.approx(part("a100"), rel=0.02)
    assert part("a100", attention="earlier") < part("a100") == part("a100", attention="portable")
    assert part("h100") < 0.75 * part("a100") and part("b200") < part("h100")
    assert part("h100", attention="tuned") == pytest.approx(part("b200", attention="tuned"), rel=1e-2)
    assert part("h100", attention="tuned") > part("h100")


def test_a_matmul_loses_a_part_of_its_last_wave_of_tiles() -> None:
    """The loss grows with the inner dim and the multiprocessors, and not with rows or columns. A measured curve includes it."""
    device = Machine.from_name("h100")
    seconds = lambda machine, rows, inner: TimeModel(Workload("", ()), machine).time_product(  # noqa: E731
        PlannedProduct(rows, inner, 8192), Plan(precision="bf16"), 1)  # fmt: skip
    lost = lambda machine, inner: 2 * seconds(machine, 4096, inner) - seconds(machine, 8192, inner)  # noqa: E731
    ramp = FITTED.ramp
    assert lost(device, 16384) - ramp == pytest.approx(4 * (lost(device, 4096) - ramp), rel=1e-6)
    none = replace(device, device=replace(device.device, multiprocessors=None))
    assert lost(none, 16384) == pytest.approx(ramp, rel=1e-6)
    curve = replace(device, matmuls=(Matmuls("bf16", ((1e9, 0.5), (1e12, 0.5))),))
    assert lost(curve, 16384) == pytest.approx(0.0, abs=1e-9)


def test_a_ring_of_short_pieces_is_slow() -> None:
    """Each ring step is a kernel with few keys, whose result is merged into the previous ones. A long sequence gains all of cp, a short one
    less."""

    def gained(tokens: int, cp: int) -> float:
        heads = (PlannedProduct(tokens, 128, tokens, 32, cut="batch", weight=False, fused=True, grows="batch", causal=True),
                 PlannedProduct(tokens, tokens, 128, 32, cut="batch", weight=False, fused=True, grows="batch", causal=True))  # fmt: skip
        pace = TimeModel(Workload("", ()), Machine.from_name("h100x8"))
        block = Block("b", products=heads, keys=2 * tokens * 128)
        one, many = (pace.time_block(block, Plan(cp=n, precision="bf16"), 1).forward for n in (1, cp))
        return one / many / cp

    assert gained(131072, 8) > 0.75 > gained(8192, 8)
    assert gained(8192, 8) < gained(8192, 2) < 1


def test_convolutions_are_slower_than_matmuls_unless_channels_are_last() -> None:
    def seconds(precision: str, convolution: bool, **given: Any) -> float:
        pace = TimeModel(Workload("", ()), Machine.from_name("a100"), RuntimeCosts(**given))
        return pace.time_product(PlannedProduct(1e6, 1152, 128, convolution=convolution), Plan(precision=precision), 1)

    for precision in ("bf16", "fp32"):
        assert seconds(precision, True) > 1.2 * seconds(precision, False)
    assert seconds("bf16", True, channels_last=True) < 0.8 * seconds("bf16", True)


def test_compiling_moves_fewer_bytes_and_launches_fewer_operators() -> None:
    block = Block("b", 32, (PlannedProduct(4096, 4096, 4096),), weights=4096**2, moved=55 * 4096**2, out=4096**2, kernels=39)
    pace = TimeModel(Workload("", (block,)), Machine.from_name("h100"))
    eager, compiled = (pace.time_block(block, Plan(precision="bf16", compile=on), 1) for on in (False, True))
    assert compiled.forward < 0.85 * eager.forward
    tiny = replace(block, products=(), moved=1.0)
    assert pace.time_block(tiny, Plan(compile=True), 1).forward == pytest.approx(pace.time_block(tiny, Plan(), 1).forward / 2)


def test_an_optimizer_on_the_host_is_slow_for_all_devices_of_a_node() -> None:
    """Its step is limited by the memory bandwidth of the host, which the devices of a node share."""
    pace = TimeModel(Workload("", ()), Machine.from_name("h100x8"))
    one = replace(pace, machine=replace(pace.machine, devices_per_node=1))
    away, here = (time_optimizer(pace, Plan(fsdp=8, offload=where), 1e9) for where in ("optimizer", "none"))
    assert away > 20 * here and away > 4 * time_optimizer(one, Plan(fsdp=8, offload="optimizer"), 1e9)


def test_hidden_messages_slow_computing_down() -> None:
    pace = TimeModel(Workload("", ()), Machine.from_name("h100"))
    assert pace.time_exposed(1.0, 100.0) == pytest.approx(FITTED.contention)
    assert pace.time_exposed(1.0, 0.0) == pytest.approx(1.0)
    assert replace(pace, software=RuntimeCosts(overlapped=False)).time_exposed(1.0, 100.0) == 1.0


def test_messages_take_longer_between_nodes_than_inside_one() -> None:
    block = Block(
        "layer", 8, (PlannedProduct(512, 4096, 4096, cut="columns"),), 4096.0**2, 4096.0**2, tp_sums=1, out=512 * 4096
    )
    work = Workload("wide", (block,))
    near, far = (TimeModel(work, Machine.from_name(name)) for name in ("h100x8", "h100x1x8"))
    for plan in (Plan(dp=8), Plan(fsdp=8), Plan(tp=8)):
        assert estimate_plan(far, plan, 4).seconds > estimate_plan(near, plan, 4).seconds


@pytest.mark.parametrize("schedule, v", [("1f1b", 1), ("zb", 1), ("zbv", 2), ("interleaved", 2), ("gpipe", 1)])
@pytest.mark.parametrize("ranks, micro", [(2, 24), (4, 40), (4, 38)])
def test_long_tables_are_played_from_short_ones(schedule: str, v: int, ranks: int, micro: int) -> None:
    if schedule == "interleaved" and micro % ranks:
        micro -= micro % ranks
    n = ranks * v
    times = StageTimes(*(tuple(base + 0.1 * ((s * 7) % n) for s in range(n)) for base in (1.0, 1.1, 0.9)), 0.05)
    kind, real = StageSchedule(schedule, ranks, v), simulate(build_table(schedule, ranks, micro, v), *times)
    assert time_schedule(kind, micro, times) == pytest.approx(real.makespan, rel=0.02)
    assert 0.6 * real.makespan < times.bound_makespan(kind, micro) <= min(real.makespan, time_schedule(kind, micro, times))
    if schedule != "gpipe":
        assert count_live(Plan(pp=ranks, schedule=schedule, stages_per_rank=v, microbatches=micro)) == real.table.peak_live


@pytest.mark.slow
def test_state_goes_to_the_host_where_that_is_faster_than_computing_again_and_the_host_has_room() -> None:
    machine = Machine.from_name("h100x2")
    tall = PlanRequest.from_job(job(layers=4, width=512, batch=64), "tall.py", machine)
    pins = {"dp": 2, "precision": "bf16", "microbatches": 1}
    need = estimate_plan(tall.pace, Plan(dp=2, precision="bf16", offload="optimizer"), 32)
    memory = leaving(need.reserved * 1.02)
    chosen = find_answer(tall, pins, memory).rows[0].plan
    assert (chosen.offload, chosen.activation_checkpointing) == ("optimizer", "none")
    small = replace(machine, host_memory=round(need.host_bytes))  # of both ranks
    assert find_answer(tall.with_machine(small), pins | {"offload": "optimizer"}, memory).best is None
    everything = estimate_plan(tall.pace, Plan(fsdp=2, precision="bf16", offload="all"), 32)
    assert everything.memory["parameters"] == everything.memory["gradients"] == 0 < everything.parts["host"]
    assert everything.host_bytes == pytest.approx(need.host_bytes / 2)


def test_heads_or_keys_are_exchanged_whatever_is_faster(asked: PlanRequest) -> None:
    """The model has four heads: four ranks can split them, eight cannot."""
    for cp, contexts in ((2, {"ring", "ulysses"}), (4, {"ring", "ulysses"}), (8, {"ring"})):
        assert {b.cp_method for b in iter_branches(asked.make_space({"cp": cp, "pp": 1, "tp": 1}))} == contexts
    times = {c: find_answer(asked, {"cp": 4, "cp_method": c}).rows[0].seconds for c in ("ring", "ulysses")}
    assert find_answer(asked, {"cp": 4}).rows[0].seconds <= min(times.values()) * 1.02


def test_on_cores_what_lies_between_slices_may_stay_whole() -> None:
    cores = PlanRequest.from_job(job(layers=2, width=32, batch=8), "tiny.py", read_machine("here").resize(2))
    assert {b.sequence_parallel for b in iter_branches(cores.make_space({"tp": 2}))} == {True, False}
    assert not find_answer(cores, {"tp": 2}).rows[0].plan.sequence_parallel


def test_attention_on_cores_leaves_out_only_whole_blocks_of_masked_keys(asked: PlanRequest) -> None:
    """torch's kernel has blocks of 512 keys."""
    cores = replace(asked.pace, machine=read_machine("here").resize(2), software=replace(asked.software, cores=CoreCosts()))
    cores = replace(cores, machine=plan_request.fill_speeds(cores.machine)[0])

    def share(pace: TimeModel, keys: int) -> float:
        made = PlannedProduct(keys, 64, keys, 4, cut="batch", weight=False, fused=True, grows="batch", causal=True)
        causal, full = (pace.time_product(replace(made, causal=causal), Plan(), 1) - 2 * pace.fitted.ramp for causal in (True, False))
        return causal / full

    assert share(cores, 128) == share(cores, 512) == pytest.approx(1.0, rel=1e-2)
    assert share(cores, 1024) == pytest.approx(0.75, rel=1e-2) and share(cores, 2**15) == pytest.approx(0.508, rel=1e-2)


def test_messages_inside_layers_wait_for_cores() -> None:
    """Each of them takes at least a wake-up; messages of dp, between steps, do not."""
    cores = PlanRequest.from_job(job(layers=2, width=32, batch=8), "tiny.py", read_machine("here").resize(2))
    free = replace(cores.pace, software=replace(cores.pace.software, cores=replace(cores.pace.software.cores, wake=0.0)))
    wake, sums = cores.pace.software.cores.wake * cores.pace.software.cores.operator, sum(b.count * b.tp_sums for b in cores.pace.work.blocks)
    for plan, messages in ((Plan(tp=2), 4 * sums), (Plan(cp=2), 3 * 2), (Plan(cp=2, cp_method="ulysses"), 4 * 2), (Plan(dp=2), 0), (Plan(fsdp=2), 0)):
        with_waits, without = (estimate_plan(pace, plan, 8 / plan.shares) for pace in (cores.pace, free))
        assert with_waits.seconds - without.seconds == pytest.approx(messages * wake), plan


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_exchanges_of_experts_wait_for_cores(dispatcher: str) -> None:
    products = (PlannedProduct(8, 16, 16), PlannedProduct(16, 16, 16, experts=4))
    block = Block("experts", products=products, routed=256.0)
    machine = replace(read_machine("here").resize(2), links=(plan_request.DEFAULT_HOST_LINK,))
    waits, free = (TimeModel(Workload("", ()), machine, RuntimeCosts(cores=CoreCosts(1e-5, wake=wake))) for wake in (70.0, 0.0))
    plan = Plan(dp=2, ep=2, token_dispatcher=dispatcher)
    assert waits.time_expert_exchange(block, plan, 1) - free.time_expert_exchange(block, plan, 1) == pytest.approx(2 * 70 * 1e-5)


def test_an_accelerator_of_unknown_bandwidth_has_no_threads() -> None:
    machine = replace(Machine.from_name("h100x8"), cores=96)
    unknown = replace(machine, device=replace(machine.device, memory_bandwidth=None))
    assert plan_request.fill_speeds(unknown)[0].device.memory_bandwidth == plan_request.CORE_RATES[1]


def test_the_utilization_of_one_process_counts_all_its_threads() -> None:
    here = Machine("here", Device("some CPU", 2**33, 2e10, Rates(fp32=1e9)), devices_per_node=2, cores=2, notes=CORES_NOTE)
    found = find_answer(PlanRequest.from_job(job(layers=2, width=32, batch=8), "tiny.py", here), {})
    alone = find_answer(found.request.with_machine(here.resize(1)), {}).rows[0]
    assert alone.estimate is not None and alone.plan.devices == 1
    shown = format_answer(replace(found, rows=(alone,))).split("why not first\n")[1].split(" %")[1].split()[-1]
    assert float(shown) == pytest.approx(100 * alone.estimate.flops / alone.seconds / (1e9 * 2**0.8), abs=0.51)


@pytest.mark.parametrize("machine, gib, pins", [("h100x8", 80, {}), ("h100x2x4", 2.16, {}), ("h100x8", 2.16, {"compile": False})])
def test_nothing_that_is_left_out_would_have_been_shown(machine: str, gib: float, pins: dict[str, Any], asked: PlanRequest) -> None:
    """Every plan of every branch is priced without bounds: each of the first meshes has the same best plan. With less memory some are tight."""
    there = asked.with_machine(Machine.from_name(machine))
    question = there.make_space(pins | {"precision": "bf16"}, gib * 2**30)
    refused, pace, costs = there.make_refusal(), there.pace, dict[tuple[int, ...], float]()
    pipelines = [("1f1b", 1), ("zb", 1), ("zbv", 2), ("interleaved", 2), ("interleaved", 4)]
    for branch in iter_branches(question):
        orders = [pair for pair in pipelines if branch.pp * pair[1] <= question.most_stages] if branch.pp > 1 else [("1f1b", 1)]
        for fsdp in list_shardings(branch, question, there.machine.devices_per_node):
            shapes = [replace(branch, dp=branch.shares // fsdp, fsdp=fsdp, schedule=s, stages_per_rank=v, shard_over_cp=over)
                      for s, v in orders for over in ((False, True) if branch.cp > 1 else (False,))]  # fmt: skip
            keys = product((1, 2, 3) if fsdp > 1 or branch.cp > 1 else (3,), ("none", "selective", "full"), ("none", "optimizer", "all"))
            for shape, (zero, recompute, offload) in product(shapes, keys):
                plan = replace(shape, zero_stage=zero, activation_checkpointing=recompute, offload=offload)
                got = estimate_plan(pace, plan, count_branch_samples(plan, question), question.memory)
                if question.can_hold(got) and not refused(plan):
                    known = compute_factors(plan, there.machine.devices_per_node)
                    tight = PREFERENCES.tight if question.count_spare(got) < question.margin else 1.0
                    mesh = Candidate(plan).mesh
                    costs[mesh] = min(costs.get(mesh, 1e9), got.seconds * prod(known.values()) * tight)
    found = find_best_plans(pace, question, refused)
    assert [c.cost for c in found.best][:8] == pytest.approx(sorted(costs.values())[:8], rel=1e-6)
    assert gib == 80 or any("tight" in c.warnings for c in found.best)


def test_the_words_of_an_answer(asked: PlanRequest) -> None:
    """Explanations for the reader: which messages count, which attention FLOPs, the meaning of a warning. No gain over one offloading device."""
    found = find_answer(asked, {"dp": 8, "compile": False})
    said = format_answer(found)
    assert "pruned" in said and "exposed communication" in said and "MFU counts the full square of attention" in said
    assert not any(word in said for word in ("sent*", "bounded", "less simple", "tight:"))
    assert found.best is not None and found.best.warnings == []
    row = replace(found.rows[0], factors={"keys": 1.0, "tight": 10.0})
    tight = format_answer(replace(found, rows=(row, *found.rows[1:])))
    assert "tight: nothing else fits" in tight and "tight: less than 5 % of a device's memory" in tight
    away = replace(found.rows[0], plan=Plan(fsdp=8, offload="all"))
    chosen = replace(found, rows=(away, *found.rows[1:]), without_offload=SearchResult((), (), {}))
    assert "without offload nothing fits" in format_answer(chosen)
    slower = replace(away, estimate=replace(away.estimate, seconds=2 * away.seconds), factors={"tight": 10.0})
    assert "without offload 100 % slower, tight" in format_answer(replace(chosen, without_offload=SearchResult((slower,), (), {})))
    lone = Plan(offload="all", precision="bf16")
    one = Candidate(lone, estimate_plan(asked.pace, lone, 32), 32)
    assert describe_baseline(one, found.best, 32).endswith(" samples/s, with offload=all")
    compiled = find_answer(asked, {"dp": 8, "compile": True})
    assert 'plan gpt.py --plan "dp=8' in format_answer(compiled) and "compile=true\" --dry-run" not in format_answer(compiled)
    plain = replace(asked, sketch=replace(asked.sketch, calls=tuple(replace(c, work=replace(c.work, keys=0.0)) for c in asked.sketch.calls)))
    assert "MFU counts" not in format_answer(find_answer(plain, {"dp": 8}))


def test_how_far_the_search_is_moves_and_is_taken_away(asked: PlanRequest, capsys) -> None:
    heard, line = list[str](), ProgressLine("plan")
    line.is_shown = True
    find_answer(replace(asked, say=heard.append), {"precision": "bf16"})
    steps = [text for text in heard if text.startswith("comparing plans: ")]
    assert len(set(steps)) == len(steps) > 10
    for said in ("comparing plans: 0 of 9", "comparing plans: 1 of 9", "reading", ""):
        line(said)
    assert capsys.readouterr().err.split("\r\x1b[K") == ["", f"plan  comparing plans {format_bar(0, BAR_WIDTH)} 0/9", "plan  reading …", ""]


def test_a_model_of_single_layers_is_compiled_only_whole(asked: PlanRequest) -> None:
    """Ranks that exchange data need units that are compiled separately. Training raises P018."""
    plain = replace(job(), model=lambda: nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64)))
    refused = PlanRequest.from_job(plain, "plain.py", Machine.from_name("h100x8")).make_refusal()
    assert "single layers" in refused(Plan(pp=2, compile=True)) and not refused(Plan(dp=2, compile=True))
    assert not asked.make_refusal()(Plan(pp=2, compile=True))
    assert any(b.compile for b in iter_branches(asked.make_space({}))) and not any(b.compile for b in iter_branches(asked.make_space({"cp": 2})))


def test_the_same_question_has_the_same_answer(asked: PlanRequest) -> None:
    first, second = (json.dumps([str(c.plan) for c in find_answer(asked, {}).result.best]) for _ in range(2))
    assert first == second


def test_pins_are_kept_and_refusals_honoured(asked: PlanRequest) -> None:
    found = find_answer(asked, {"tp": 2, "activation_checkpointing": "full"}, top=50)
    assert {row.plan.tp for row in found.rows if row.why != "" and row.fits and row in found.rows[:1]} == {2}
    assert all(c.plan.tp == 2 and c.plan.activation_checkpointing == "full" for c in found.result.best)
    assert all(c.plan.devices == 8 and c.plan.shares <= 32 for c in found.result.best)
    refused = asked.make_refusal()
    assert (
        "stages" in refused(Plan(pp=64))
        and refused(Plan(pp=2, schedule="zb", compile=True))
        and not refused(Plan(dp=8))
    )
    assert "does not divide" in refused(Plan(tp=5))


class Clipped(torch.optim.SGD):
    """Clips by the norm of all gradients itself."""

    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


@pytest.mark.parametrize("optimizer, cuts", [(Clipped, False), (torch.optim.Adafactor, True), (torch.optim.SGD, True)])
def test_an_optimizer_of_several_tensors_has_no_plans_that_cut_parameters(optimizer: Any, cuts: bool) -> None:
    found = find_answer(
        PlanRequest.from_job(replace(job(), optimizer=lambda p: optimizer(p, lr=1e-2)), "a.py", Machine.from_name("h100x2")), {}
    )
    cutting = [c for c in found.result.best if c.plan.fsdp * c.plan.tp > 1]
    assert bool(cutting) == cuts
    if not cuts:
        assert "Clipped cannot update parts of parameters, which tp=2 needs" in format_answer(found)


def test_what_does_not_fit_is_never_chosen_and_said() -> None:
    small = PlanRequest.from_job(job(width=256, batch=64), "big.py", Machine.from_name("h100x4"))
    need = estimate_plan(small.pace, Plan(dp=4, precision="bf16"), 16).reserved
    found = find_answer(small, {"offload": "none"}, memory=leaving(need * 0.6))
    assert found.best is not None and found.best.plan.dp != 4
    assert any(" over: " in row.why for row in found.rows)
    nothing = find_answer(small, {}, memory=leaving(1e6))
    assert nothing.best is None and "no plan fits" in format_answer(nothing)


def test_pins_that_no_plan_keeps_are_said(asked: PlanRequest) -> None:
    found = find_answer(asked, {"tp": 3})
    assert found.best is None and "no plan for 8 devices" in format_answer(found) and "tp=3" in format_answer(found)
    assert "chosen" not in format_answer(found)
    said = explain_no_plan(found)
    assert said.code == "P070" and "tp=3 does not divide 8 devices" in said.why and "--gpus 3" in said.fix
    assert "too few for 8 stages" in explain_no_plan(find_answer(asked, {"pp": 8})).why
    plain = replace(job(), model=lambda: nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64)))
    found = find_answer(PlanRequest.from_job(plain, "plain.py", Machine.from_name("h100x8")), {"cp": 2})
    assert "only for models that call scaled_dot_product_attention" in explain_no_plan(found).why


@pytest.mark.slow
def test_the_fewest_devices_that_are_as_fast_are_chosen_and_one_alone_is_told(asked: PlanRequest) -> None:
    """A thousand parameters gain nothing from eight devices. A wide model with a large batch does."""
    tiny = PlanRequest.from_job(job(layers=2, width=8, batch=8), "tiny.py", Machine.from_name("h100x8"))
    found = add_baseline(find_answer(tiny, {}), {}, None)
    assert found.best is not None and found.best.plan.devices == 1 and "the fewest devices" in format_answer(found)
    assert "one device alone" in format_answer(found) and "which is the choice" in format_answer(found)
    assert any("same speed, but 8 devices" in row.why for row in found.rows)
    fastest = min(c.seconds for c in found.result.best)
    assert found.best.seconds <= fastest * 1.02
    kept = add_baseline(find_answer(tiny, {"dp": 8}), {"dp": 8}, None)
    assert kept.best is not None and kept.best.plan.dp == 8 and "8 devices, is" in format_answer(kept)
    assert add_baseline(find_answer(tiny, {}), {}, None, choose=False).rows[0].plan.devices == 8
    wide = PlanRequest.from_job(job(layers=8, width=1024, batch=4096), "wide.py", Machine.from_name("h100x8"))
    large = add_baseline(find_answer(wide, {"precision": "fp32", "tp": 1, "pp": 1}), {"precision": "fp32", "tp": 1, "pp": 1}, None)
    assert large.best is not None and large.best.plan.devices == 8
    assert json.loads(json.dumps(large.to_dict()))["one_device"]["samples_per_s"] > 0
    assert large.baseline is not None and float(describe_baseline(large.baseline, large.best, 4096).split(" is ")[1].split()[0]) > 4


def test_a_plan_that_waits_for_its_host_says_so() -> None:
    """The part of the step in which a slower plan loses most has an explanation, or is named itself."""
    tall = PlanRequest.from_job(job(layers=4, width=256, batch=64), "tall.py", Machine.from_name("h100x2"))
    plan = Plan(fsdp=2, precision="bf16", offload="all")
    best = Candidate(plan, estimate_plan(tall.pace, plan, 32), 32)
    assert best.estimate is not None
    for part, said in (("host", "waits for weights from the host"), ("other", "other"), ("fixed", "slower")):
        longer = replace(best.estimate, seconds=best.seconds + 1, parts=best.estimate.parts | {part: 1.0})
        assert said in explain_choice(Candidate(plan, longer, 32), best)


def test_the_choice_of_a_number_format_is_in_the_headline(asked: PlanRequest) -> None:
    large = replace(asked, job=replace(asked.job, batch=1 << 16))
    head = next(line for line in format_answer(find_answer(large, {})).splitlines() if line.startswith("choice"))
    assert "in bf16" in head and "--set precision=fp32" in head
    assert "in bf16" not in format_answer(find_answer(large, {"precision": "bf16"}))


def test_memory_has_a_unit(asked: PlanRequest) -> None:
    with pytest.raises(PlaitError, match="80GiB"):
        parse_size("80")
    nothing = format_answer(find_answer(asked, {}, memory=1 << 30))
    assert "0.0" not in nothing and "own context" in nothing and "the least is" in nothing


@pytest.mark.slow
def test_host_memory_of_a_plan_is_that_of_a_dry_run() -> None:
    given = job(layers=4, width=256, batch=8)
    found = make_memory_table(given, Plan.parse("dp=2 offload=optimizer"))
    priced = estimate_plan(
        PlanRequest.from_job(given, "a.py", Machine.from_name("h100x2")).pace, Plan.parse("dp=2 offload=optimizer"), 4
    )
    assert priced.host_bytes == pytest.approx(found.hosted, rel=0.05)
    assert sum(priced.memory.values()) == pytest.approx(found.total, rel=0.25)
    assert not {"optimizer", "host copies"} & found.categories.keys()


def test_files_that_cannot_be_written_are_refused_at_once(tmp_path, capsys) -> None:
    file = tmp_path / "job.py"
    file.write_text("from tests.unit.test_planner import job\n")
    for out, why in ((tmp_path / "no" / "p.toml", "does not exist"), (tmp_path, "a folder")):
        assert main(["plan", str(file), "--machine", "h100x2", "--output", str(out)]) == 2
        said = capsys.readouterr().err
        assert "M016" in said and why in said
    assert main(["bench", "compute", "--nproc", "1", "--output", str(tmp_path / "no" / "m.toml")]) == 2
    assert "M016" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_says_whether_a_machine_holds_it(tmp_path, capsys) -> None:
    file = tmp_path / "job.py"
    file.write_text("from tests.unit.test_planner import job\n")
    words = ["plan", str(file), "--plan", "dp=2", "--dry-run", "--machine", "a100x2"]
    assert main(words) == 0 and "\nfits: a plan may use " in capsys.readouterr().out
    assert main([*words, "--memory", "1.06GiB"]) == 1 and "does not fit" in capsys.readouterr().out


def test_the_answer_shows_the_classical_choices_and_can_be_used(asked: PlanRequest, tmp_path) -> None:
    found = find_answer(asked, {})
    plans = [row.plan for row in found.rows]
    assert any(p.dp == 8 for p in plans) and any(p.fsdp == 8 for p in plans) and len(plans) <= 8
    said = format_answer(found)
    assert "confidence" in said and "memory of #1" in said and all(str(p) in said for p in plans)
    (tmp_path / "plan.toml").write_text(answer_to_toml(found))
    assert Plan.load(tmp_path / "plan.toml") == plans[0]
    assert json.loads(json.dumps(found.to_dict()))["plans"][0]["fits"] is True


def test_of_plans_alike_the_simplest_comes_first() -> None:
    tiny = PlanRequest.from_job(job(layers=2, width=8, batch=8), "tiny.py", Machine.from_name("h100x2"))
    found = find_answer(tiny, {"precision": "fp32", "compile": False})
    first, fastest = found.rows[0], min(c.seconds for c in found.result.best)
    assert first.seconds <= fastest * 1.02 and len(first.plan.changed()) == 1


def test_attention_takes_its_time_with_few_keys_and_narrow_heads() -> None:
    """Half of the full rate with a thousand keys and a causal mask, more without one. Heads of 64 reach five sixths of the rate of 128."""
    pace = TimeModel(Workload("", ()), Machine.from_name("a100"))

    def rate(keys: int, head: int = 128, causal: bool = True, **keywords: Any) -> float:
        product = PlannedProduct(keys, head, keys, 32, weight=False, fused=True, causal=causal)
        return pace.get_attention_fraction(product, Plan(precision="bf16", **keywords))

    assert rate(1000) == pytest.approx(rate(10**9) / 2, rel=1e-3) and rate(1000, causal=False) == pytest.approx(rate(10**9) * 0.8, rel=1e-3)
    assert rate(8192, 64) == pytest.approx(rate(8192) * 5 / 6) and rate(8192, 256) > rate(8192)
    assert rate(8192, cp=8) == pytest.approx(rate(1024)), "a step of the ring is a kernel of its own"
    assert rate(8192, cp=8, cp_method="ulysses") == rate(8192)


def test_gradients_of_micro_batches_are_added_up() -> None:
    """An operator reads and writes the sums. For one micro-batch nothing is added, and for frozen weights nothing."""
    block = Block("layer", 1, (PlannedProduct(4096, 4096, 4096),), 4096.0**2, inputs=1.0, out=1.0, kernels=1)
    work = Workload("", (block,))
    times = [TimeModel(each, Machine.from_name("h100"), software).time_block(block, Plan(microbatches=n, precision="bf16"), 1).back_weight
             for each, software, n in ((work, RuntimeCosts(), 1), (work, RuntimeCosts(), 2), (work, RuntimeCosts(adds=False), 2),
                                       (replace(work, frozen=1.0), RuntimeCosts(), 2))]  # fmt: skip
    stream = TimeModel(work, Machine.from_name("h100")).memory_bandwidth
    assert times[1] - times[0] == pytest.approx(4096**2 * 10 / stream) and times[2] == times[0] and times[3] == 0


def test_rows_that_travel_while_others_compute_are_hidden() -> None:
    routed = Block("experts", 1, (PlannedProduct(65536, 4096, 4096, experts=8),), 0.0, experts=8 * 4096.0**2, inputs=1.0, out=1.0, kernels=1,
                   routed=8192.0 * 4096)  # fmt: skip
    paces = [TimeModel(Workload("", (routed,)), Machine.from_name("h100x8"), RuntimeCosts(hidden=hidden)) for hidden in (False, True)]
    shown, hidden = (pace.time_block(routed, Plan(ep=8, dp=8, precision="bf16"), 1).sent for pace in paces)
    assert 0 < hidden < shown


def test_a_row_goes_to_a_rank_once() -> None:
    """With the vendor's dispatcher, for any number of its experts there: 8 choices among 2 ranks go to 1.99 of them."""
    routed = Block("experts", 1, (PlannedProduct(8192.0, 64, 64), PlannedProduct(65536, 64, 64, experts=8)), 0.0, experts=8 * 64.0**2, inputs=1.0,
                   out=1.0, kernels=1, routed=65536.0 * 2**20)  # fmt: skip
    paces = [TimeModel(Workload("", (routed,)), Machine.from_name("h100x8"), RuntimeCosts(portable=portable)) for portable in (False, True)]
    for ep in (2, 8):
        once, each = (pace.time_expert_exchange(routed, Plan(ep=ep, dp=8, precision="bf16"), 1) for pace in paces)
        assert once / each == pytest.approx(ep * (1 - (1 - 1 / ep) ** 8) / 8, rel=0.01)


def test_weights_gathered_in_pieces_pay_for_each() -> None:
    block = Block("layer", 1, (PlannedProduct(64, 16384, 16384),), 4 * 16384.0**2, inputs=1.0, out=1.0, kernels=1)
    waits = [estimate_plan(TimeModel(Workload("", (block,)), Machine.from_name("a100x8x64"),
        RuntimeCosts(piece=piece)), Plan(fsdp=512, precision="bf16"), 1)
             .parts["gradients"] for piece in (1e12, 5e8, 5e7)]  # fmt: skip
    assert waits[0] < waits[1] < waits[2]


def test_frozen_weights_that_are_sharded_are_gathered() -> None:
    """The gradients of adapters are small, but the frozen weights must be gathered."""
    block = Block("layer", 4, (PlannedProduct(64, 4096, 4096),), 4096.0**2, inputs=1.0, out=1.0, kernels=1)
    pace = TimeModel(Workload("", (block,), frozen=1.0), Machine.from_name("h100x8"))
    waits = [estimate_plan(pace, Plan(fsdp=8, zero_stage=zero, precision="bf16"), 1).parts["gradients"] for zero in (3, 1)]
    assert waits[0] > 0 == waits[1]


def test_measured_runs_correct_what_is_like_them() -> None:
    words = {"occasion": "a", "device": "d", "model": "m", "precision": "p", "layout": "l"}
    here, other = RunTraits(words), RunTraits({key: value + "2" for key, value in words.items()})
    before = fit_correction(here)
    after = fit_correction(here, [(here, log(1.3))] * 4)
    assert before.factor == 1 and 1.15 < after.factor < 1.3 and after.deviation < before.deviation
    assert fit_correction(other, [(here, log(1.3))] * 4).factor == pytest.approx(1.0)
    assert before.low == pytest.approx(exp(-1.645 * before.deviation))


def test_a_slow_network_shows_where_a_step_is_messages() -> None:
    sending, computing = RunTraits({}, {"gradients": 0.5}), RunTraits({}, {"gradients": 0.0})
    slow = [(sending, log(1.4))] * 4
    assert fit_correction(sending, slow).factor > 1.3
    assert 1.05 < fit_correction(RunTraits({}, {"gradients": 0.25}), slow).factor < fit_correction(sending, slow).factor
    assert fit_correction(computing, slow).factor == 1


def test_an_unmeasured_step_is_as_unsure_as_published_ones_were_wrong(asked: PlanRequest) -> None:
    """Not like the difference between two runs of one machine: every part of the prediction may be wrong."""
    sure = find_answer(asked, {}).confidence
    assert sure.deviation > 1.5 * NOISE and sure.low < 0.85


def test_more_devices_are_not_linearly_faster(asked: PlanRequest) -> None:
    found = goals.compare_sizes(asked, {"precision": "bf16"}, None, [1, 2, 8])
    assert [s.devices for s in found.sizes] == [1, 2, 8] and found.sizes[0].efficiency == 1
    assert found.sizes[2].efficiency < found.sizes[1].efficiency < 1 and "devices" in found.to_text()


@pytest.mark.prove
def test_the_cheapest_the_fewest_and_the_largest(asked: PlanRequest) -> None:
    cheap = goals.find_cheapest(asked, {}, None)
    assert (
        cheap.chosen is not None and cheap.sizes[cheap.chosen].devices == 1
    )  # such a small split gains nothing
    few = goals.find_fewest(asked, {}, None, 1000.0)
    assert few.chosen == 0 and few.sizes[0].devices == 1
    never = goals.find_fewest(asked, {}, None, 1e-9)
    assert never.chosen is None and "not even" in never.note
    large = goals.find_largest_batch(asked, {"precision": "bf16"}, leaving(1 << 30))
    assert large.batch > 32
    tight = replace(asked, job=replace(asked.job, batch=large.batch * 2))
    assert find_answer(tight, {"precision": "bf16", "microbatches": 1}, leaving(1 << 30)).best is None


@pytest.mark.slow
def test_the_longest_argument_that_fits() -> None:
    machine, tried = Machine.from_name("h100x2"), []

    def again(arguments: dict[str, str]) -> PlanRequest:
        tried.append(int(arguments["layers"]))
        return PlanRequest.from_job(job(layers=tried[-1], width=512, batch=2), "gpt.py", machine, split=False)

    memory = leaving(2.1e8)
    goal = goals.make_largest_goal("layers", {"layers": "2"}, again)
    pins = {"fsdp": 2, "activation_checkpointing": "none", "precision": "fp32", "offload": "none"}
    found = goal(again({"layers": "2"}), pins, memory)
    best = int(found.note.split()[1])
    assert 2 < best < max(tried) and found.chosen == 0
    assert not goals.plan_devices(again({"layers": str(best + max(2, best // 16))}), pins, memory, 2).seconds


def test_sizes_of_a_machine() -> None:
    machine = Machine.from_name("h100x8x4")
    assert list_device_counts(machine) == [1, 2, 4, 8, 16, 32]
    assert machine.resize(4).devices == 4 and machine.resize(16).nodes == 2


@pytest.mark.parametrize("given, what", [("80GiB", 80 * 2**30), ("40gb", 40e9), ("1e9", 1e9)])
def test_sizes_of_memory(given: str, what: float) -> None:
    assert parse_size(given) == what


def test_a_machine_of_which_nothing_is_known_is_guessed_and_said() -> None:
    found = find_answer(PlanRequest.from_job(job(), "gpt.py", _unknown()), {})
    assert found.request.is_guessed and "plait bench" in format_answer(found)


def _unknown() -> Machine:
    from plait.config.hardware import Device

    return Machine("cores", Device("some processor", 8 << 30), devices_per_node=2)


@pytest.mark.parametrize(
    "words, code",
    [
        (["--memory", "much"], "U002"), (["--gpus", "0"], "U002"), (["--scale", "a"], "U002"), (["--set", "tpp=2"], "T001"),
        (["--objective", "min-devices"], "U002"), (["--deadline", "24h"], "U002"), (["--maximize", "length"], "U002"), (["--machine", "h1000x8"],
            "M010"),
        (["--gpus", "12"], "U002"), (["--objective", "min-devices", "--deadline", "soon"], "U002"),
    ],
)  # fmt: skip
def test_wrong_questions_are_refused(words: list[str], code: str, capsys, tmp_path) -> None:
    file = tmp_path / "job.py"
    file.write_text("from tests.unit.test_planner import job\n")
    assert main(["plan", str(file), *(["--machine", "h100x8"] if "--machine" not in words else []), *words]) == 2
    assert code in capsys.readouterr().err


def test_a_run_that_fails_when_tried_says_why(tmp_path) -> None:
    from plait.cli.trial_run import measure_trial
    from plait.config.command_options import TrainOptions

    assert "J001" in measure_trial(TrainOptions(job=str(tmp_path / "none.py"), plan="dp=1")).failed


def test_answers_of_nothing_are_empty(asked: PlanRequest) -> None:
    question = asked.make_space({})
    found = build_answer(asked, question, SearchResult((), (), {}), 5, 0.0)
    assert found.best is None or found.best.fits
