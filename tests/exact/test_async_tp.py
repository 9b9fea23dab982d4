"""`async_tp`: all-gathers and reduce-scatters fused with matrix products in one operator. It is compared with plain collectives, on doubles
of
torch's GPU operators with the same arguments and results, over gloo.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rarely import every
from test_sequence_parallel import JOBS
from torch import Tensor, nn

from plait.config.conflicts import find_ineffective_keys
from plait.config.errors import DIFFERENT, PlaitError
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch.fork import run_ranks
from plait.parallel.tensor.sequence import async_tp
from plait.planner.dryrun.dry_run import trace_first_step
from plait.proof.verify import verify
from plait.tensors.collectives import gather_partial, reduce_scatter_region
from plait.tensors.rows import Rows

SCHEMAS = {
    "fused_all_gather_matmul": (
        "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True) -> (Tensor?, Tensor[])"
    ),
    "fused_matmul_reduce_scatter": "(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name) -> Tensor",
}
PLANS = (
    ("gpt", "tp=2"), ("llama", "tp=2"), ("llama", "fsdp=2 tp=2"), ("gpt", "fsdp=2 tp=2"), ("gpt", "tp=2 activation_checkpointing=full"),
    ("llama", "tp=2 activation_checkpointing=selective"), ("beside", "tp=2 microbatches=2"), ("short", "tp=4"), ("t5", "tp=2"),
    ("llama_tied", "pp=2 tp=2 microbatches=2 schedule=zb"), ("gpt", "tp=2 dp=2 precision=bf16"), ("encoder", "tp=2"), ("gemma", "tp=2"),
)  # fmt: skip


def all_gather_matmul(
    A_shard: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    group = dist.distributed_c10d._resolve_process_group(group_name)
    assert A_shard.is_contiguous() and 0 <= gather_dim < A_shard.dim() - 1 and all(B.dim() == 2 for B in Bs)
    assert {B.dtype for B in Bs} == {A_shard.dtype}, "a kernel casts nothing"
    parts = [torch.empty_like(A_shard) for _ in range(group.size())]
    dist.distributed_c10d.all_gather(parts, A_shard, group=group)  # called by plait, not by the job
    A = torch.cat(parts, gather_dim)
    return A if return_A else None, [A @ B for B in Bs]


def matmul_reduce_scatter(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    group = dist.distributed_c10d._resolve_process_group(group_name)
    assert reduce_op == "sum" and A.is_contiguous() and B.dim() == 2 and A.dtype == B.dtype
    assert 0 <= scatter_dim < A.dim() - 1 and A.shape[scatter_dim] % group.size() == 0
    whole = A @ B
    dist.distributed_c10d.all_reduce(whole, group=group)
    return whole.chunk(group.size(), scatter_dim)[group.rank()].contiguous()


@pytest.fixture
def on_device() -> Iterator[None]:
    """Register the GPU operators for the CPU, and let forked ranks use them."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", all_gather_matmul, "CPU")
    library.impl("fused_matmul_reduce_scatter", matmul_reduce_scatter, "CPU")
    token = async_tp.FUSED_DEVICES.set(("cpu",))
    yield
    async_tp.FUSED_DEVICES.reset(token)
    library._destroy()


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_expected_of_torch(name: str) -> None:
    operator = getattr(async_tp.load_symm_mem(), name).default
    assert str(operator._schema) == f"symm_mem::{name}{SCHEMAS[name]}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"symm_mem::{name}", "CUDA")


@pytest.mark.slow
@pytest.mark.parametrize("name, text", every(4, PLANS))
def test_equal(name: str, text: str) -> None:
    verdict = verify(JOBS[name](), Plan.parse(f"{text} async_tp=true"), steps=2)
    assert verdict.equal, (verdict.code, verdict.parameter, verdict.cause, verdict.to_dict())


@pytest.mark.slow
@pytest.mark.parametrize("name, text", every(3, PLANS))
def test_equal_by_the_operators_of_devices(on_device: None, name: str, text: str) -> None:
    verdict = verify(JOBS[name](), Plan.parse(f"{text} async_tp=true"), steps=2)
    assert verdict.equal, (verdict.code, verdict.parameter, verdict.cause, verdict.to_dict())


@pytest.mark.slow
def test_a_column_left_out_of_backward_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = async_tp.matmul_reduce_scatter
    monkeypatch.setattr(async_tp, "matmul_reduce_scatter", lambda pairs, where: real(pairs[:1], where))
    verdict = verify(JOBS["llama"](), Plan.parse("tp=2 async_tp=true"), steps=2, quiet=True)
    assert verdict.exit_code == DIFFERENT, verdict.to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("name", ("gpt", "llama"))
def test_every_region_takes_part_and_nothing_more_is_sent(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Three blocks of two regions. Columns with the same input are gathered for once."""
    made: dict[int, int] = {}
    real = Engine.backward

    def backward(self: Any, batch: Any) -> Any:
        rows = [m for m in self.model.modules() if isinstance(m, nn.Linear) and "forward" in vars(m)]
        made[len(made)] = (
            len({type(m.forward) for m in rows}),
            sum(isinstance(m.forward, async_tp.FusedRow) for m in rows),
        )
        return real(self, batch)

    monkeypatch.setattr(Engine, "backward", backward)
    sent = [trace_first_step(JOBS[name](), Plan.parse(f"tp=2{more}")) for more in ("", " async_tp=true")]
    assert [s.totals for s in sent[0]] == [s.totals for s in sent[1]]
    assert set(made.values()) == {(0, 0), (2, 6)}


def differentiated_twice(place: Any) -> dict[str, Any]:
    """Whether first and second gradients are those of plain collectives and products."""
    group, where_rows = place.connect(torch.device("cpu")), Rows.make_even(4, 2)
    draw = torch.Generator().manual_seed(place.rank)
    shapes = ((3, 2, 6), (4, 6), (4, 6), (6, 4))
    values = [torch.randn(*shape, dtype=torch.float64, generator=draw) for shape in shapes]
    where = (1, where_rows, group)

    def fused(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
        _, a, b = async_tp._ColumnsFunction.apply(x, where, up, gate)
        return async_tp._RowFunction.apply(a * b.sin(), down, where)

    def plain(x: Tensor, up: Tensor, gate: Tensor, down: Tensor) -> Tensor:
        whole = gather_partial(x, *where)
        return reduce_scatter_region(((whole @ up.t()) * (whole @ gate.t()).sin()) @ down.t(), *where)

    def by(function: Any) -> list[Tensor]:
        given = [t.clone().requires_grad_() for t in values]
        first = torch.autograd.grad((function(*given) ** 3).sum(), given)
        again = torch.autograd.grad((function(*given) ** 3).sum(), given, create_graph=True)
        squares = torch.stack([(g**2).sum() for g in again]).sum()
        return [*first, *again, *torch.autograd.grad(squares, given)]

    return {"same": [torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(by(fused), by(plain))]}


@pytest.mark.parametrize("doubled", (False, True))
def test_gradients_and_their_gradients(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, doubled: bool
) -> None:
    if doubled:
        request.getfixturevalue("on_device")
        monkeypatch.setattr(async_tp, "all_gather_rows", None)  # no plain collective may be used
        monkeypatch.setattr(async_tp, "reduce_scatter_rows", None)
    assert [found["same"] for found in run_ranks(differentiated_twice, 2)] == [[True] * 12] * 2


def test_it_is_told_where_it_has_no_effect_or_does_not_work() -> None:
    for text, word in (
        ("dp=2", "tp=2"),
        ("tp=2 compile=true", "compile=false"),
        ("tp=2 sequence_parallel=false", "sequence"),
    ):
        (problem,) = [p for p in find_ineffective_keys(Plan.parse(f"{text} async_tp=true")) if "async_tp" in p.what]
        assert problem.code == "P030" and problem.fix[0].startswith(word)
    with pytest.raises(PlaitError) as refused:
        verify(JOBS["gpt"](), Plan.parse("tp=2 async_tp=true precision=fp8"))
    assert "P033" in [problem.code for problem in refused.value.problems]


@pytest.mark.parametrize("count, reaches, why", ((1, True, "sees"), (2, False, "device 1"), (2, True, "")))
def test_devices_that_cannot_read_each_other_are_refused(
    monkeypatch: pytest.MonkeyPatch, count: int, reaches: bool, why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reaches)
    if not why:
        async_tp.check_peer_access(torch.device("cuda", 0), 0, 2)
        return
    with pytest.raises(PlaitError) as refused:
        async_tp.check_peer_access(torch.device("cuda", 0), 0, 2)
    assert refused.value.problems[0].code == "H015" and why in str(refused.value)
