"""`compile=true`: the same training under each axis, compiled without fallback, and one compiled graph for all equal blocks."""

from collections.abc import Callable
from typing import Any

import jobs
import jobs_moe
import jobs_real
import pytest
import torch
from rarely import rarely
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.proof.verify import verify

pytestmark = pytest.mark.filterwarnings("default")  # torch's compiler warns about itself

PLANS = [
    "tp=2", *rarely(
        "fsdp=2", "cp=2", "cp=2 cp_method=ulysses", "pp=2 microbatches=2", "activation_checkpointing=full", "dp=2 tp=2", "fsdp=2 tp=2", "dp=2 cp=2",
        "fsdp=2 cp=2 shard_over_cp=true",
        "dp=2 pp=2 microbatches=2", "tp=2 pp=2 microbatches=2", "tp=2 activation_checkpointing=full", "precision=bf16", "microbatches=2", "tp=2 cp=2",
        "pp=2 schedule=interleaved stages_per_rank=2 microbatches=2",
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("job", [jobs_real.gpt, *rarely(jobs_real.llama)])
@pytest.mark.parametrize("text", PLANS)
def test_equal(job: Callable[[], Job], text: str) -> None:
    """GPT has dropout layers; Llama draws inside its attention."""
    assert verify(job(), Plan.parse(f"{text} compile=true")).equal


@pytest.mark.parametrize(
    ("job", "text"),
    rarely((jobs_moe.gpt, "ep=2"), (jobs_moe.mixtral, "ep=2"), (jobs_real.digits, "dp=2"), (jobs_real.unet, "dp=2")),
)
def test_other_models_are_equal(job: Callable[[], Job], text: str) -> None:
    assert verify(job(), Plan.parse(f"{text} compile=true")).equal


@pytest.mark.slow
@pytest.mark.messages
def test_a_model_that_the_job_compiles_is_equal() -> None:
    """Its batch statistics are gathered inside its graph, by a different operator than in a dry run. V012 was a false alarm here."""
    job = jobs.make(lambda: torch.compile(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), backend="eager"))
    assert verify(job, Plan.parse("dp=2")).equal


class Channels(nn.Module):
    """Dropout on a tensor with permuted strides; its mask is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x.unsqueeze(-1).expand(-1, -1, 6))
        return x + self.second(self.drop(rows.transpose(1, 2)).transpose(1, 2)).mean(1)


@pytest.mark.slow
def test_dropout_of_what_is_not_contiguous() -> None:
    job = jobs.make(lambda: nn.Sequential(Channels(), Channels(), nn.Linear(6, 1)))

    def losses(place: Place, plan: str) -> dict[str, Any]:
        engine = Engine(job, plan, place=place)
        return {"losses": [engine.step(batch).loss for batch in engine.batches()]}

    (plain,) = fork.run_ranks(lambda place: losses(place, "dp=1"), 1)
    with torch.compiler.config.patch(force_disable_caches=True):  # the cache ignores the strides of an operator's result
        (compiled,) = fork.run_ranks(lambda place: losses(place, "compile=true"), 1)
    assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def gpt(depth: int) -> Job:
    return jobs_real.example("stdlib_gpt", depth=depth, width=16, heads=2, length=8, dropout=0.1, batch=12)


def graphs(text: str, job: Callable[[int], Job] = gpt, depths: tuple[int, ...] = (2, 4)) -> list[list[int]]:
    """The number of graphs that a step makes on each rank, for models of these depths; no code is generated."""

    def rank(place: Place) -> dict[str, Any]:
        import torch._dynamo.utils as dynamo

        found = []
        compile_ = torch.compile
        torch.compile = lambda f, **_: compile_(f, backend="eager")  # type: ignore[assignment]
        for depth in depths:
            torch.compiler.reset()
            dynamo.counters.clear()
            engine = Engine(job(depth), text, place=place)
            engine.step(next(iter(engine.batches())))
            assert engine.rank_model.techniques.compiled is not None and engine.rank_model.techniques.compiled.report_failures() == []
            found.append(dynamo.counters["stats"]["unique_graphs"])
        return {"graphs": found}

    return [told["graphs"] for told in fork.run_ranks(rank, Plan.parse(text).world)]


@pytest.mark.parametrize(
    ("text", "each"),
    [
        ("compile=true", 1),  # a block is one graph, with its dropout
        *(
            pytest.param(text, each, marks=pytest.mark.slow)
            for text, each in (("fsdp=2 compile=true", 1), ("cp=2 compile=true", 2), ("tp=2 compile=true", 9))
        ),
    ],
)
def test_blocks_that_are_alike_share_their_graphs(text: str, each: int) -> None:
    """The number of graphs does not depend on the depth. (tp: two more on the rank that adds no bias.)"""
    for found in graphs(text):
        assert found[0] == found[1] and each <= found[0] <= each + 2


@pytest.mark.slow
def test_an_uncut_block_between_cut_ones_runs_no_code_of_theirs() -> None:
    """The hooks of a block's layers are compared before a compiled graph of another block is used."""

    def rank(place: Place) -> dict[str, Any]:
        compile_ = torch.compile
        torch.compile = lambda f, **_: compile_(f, backend="eager")  # type: ignore[assignment]
        engine = Engine(jobs.make(Wide), "compile=true", place=place)
        seen: list[str] = []
        layers = {n: m for n, m in engine.model.named_modules() if n.endswith("1.layer")}
        for name, module in layers.items():
            module.register_forward_hook(torch.compiler.disable(lambda *_, name=name: seen.append(name)))
        engine.step(next(iter(engine.batches())))
        return {"seen": seen}

    assert fork.run_ranks(rank, 1)[0]["seen"] == ["blocks.1.layer"]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Wide(nn.Module):
    def __init__(self, blocks: int = 3, kind: type[nn.Module] = Inner) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(kind() for _ in range(blocks)), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).squeeze(1)


@pytest.mark.parametrize(
    ("job", "text", "code"),
    [
        (gpt, "pp=2 schedule=zb microbatches=2", "P027"),
        (gpt, "activation_checkpointing=selective", "P035"),
        (lambda _: jobs.mlp(), "pp=2 microbatches=2", "P018"),
    ],
)
def test_what_cannot_be_compiled_is_refused(job: Callable[[int], Job], text: str, code: str) -> None:
    with pytest.raises(PlaitError) as caught:
        verify(job(2), Plan.parse(f"{text} compile=true"))
    assert caught.value.codes == [code] and caught.value.problems[0].why and caught.value.problems[0].fix


class Restless(Inner):
    """Its control flow changes in each call."""

    times = 0

    def forward(self, x: Tensor) -> Tensor:
        Restless.times += 1
        return super().forward(x) * Restless.times


class Opaque(Inner):
    """Runs where torch.compile is disabled."""

    def forward(self, x: Tensor) -> Tensor:
        return unseen(self, x)


@torch.compiler.disable
def unseen(block: Inner, x: Tensor) -> Tensor:
    return x + block.layer(x).tanh()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "told"), [(Restless, "compiled too often"), (Opaque, "made no graph")])
def test_what_torch_gives_up_is_told(kind: type[nn.Module], told: str) -> None:
    def rank(place: Place) -> dict[str, Any]:
        compile_ = torch.compile
        torch.compile = lambda f, **_: compile_(f, backend="eager", dynamic=False)  # type: ignore[assignment]
        engine = Engine(jobs.make(lambda: Wide(3, kind)), "compile=true", place=place)
        lines = []
        for batch in engine.batches():
            engine.step(batch)
            lines += engine.rank_model.techniques.compiled.report_failures() if engine.rank_model.techniques.compiled is not None else []
        return {"lines": lines}

    lines = fork.run_ranks(rank, 1)[0]["lines"]
    assert len(lines) == 1 and told in lines[0]


class Again(Inner):
    """A block with its own checkpoint around a layer that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y: Any = checkpoint(lambda x: self.drop(self.layer(x)).tanh(), x, use_reentrant=False)
        return x + y


@pytest.mark.slow
def test_a_checkpoint_inside_of_a_compiled_block_draws_the_same_or_is_refused() -> None:
    try:
        assert verify(jobs.make(lambda: Wide(2, Again)), Plan.parse("compile=true")).equal
    except PlaitError as error:
        assert "J014" in str(error) or error.codes == ["J014"], error


def test_the_note_names_units_that_stay_uncompiled() -> None:
    from plait.parallel.compiled import CompiledUnits

    units = CompiledUnits([], {"blocks.0": "stays so", "blocks.1": "stays so", "head": "stays"})
    assert units.describe_skips() == ["compile: blocks.* stays so", "compile: head stays"]
    assert units.report_failures() == []
