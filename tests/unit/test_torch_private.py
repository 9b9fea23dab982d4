"""The contract of every private or unstable torch name that plait uses: if a release changes one, a test here fails.

Each test names the contract of one name, by its place in torch and not in plait. `test_every_private_name_has_one`
reads the source, so a newly used name needs a test.
"""

import copy
import dataclasses
import random
import types
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data import dataloader as data_loader

from plait.launch.fork import run_ranks
from plait.randomness.distributions import mask_op
from plait.tensors import torch_private
from plait.tensors.fake import FAKE_FAILURES, RemoteFakeMode, is_remote_fake
from plait.tensors.module_state import convert_module, materialize
from plait.tensors.torch_private import (
    GraphExecGroup,
    checkpoint_frame,
    dataclass_leaves,
    is_seeded,
    recompute_once,
)

from .test_house import FILES, at, private_torch_names

KNOWN: set[str] = set()


def contract(*names: str):
    """The test that follows covers these names."""
    KNOWN.update(names)
    return lambda test: test


def test_every_private_name_has_one() -> None:
    used = [(at(p, node, name), name) for p in FILES for node, name in private_torch_names(p)]
    missing = [place for place, name in used if name not in KNOWN]
    assert not missing, "no contract test for\n" + "\n".join(missing)


def test_no_contract_outlives_its_name() -> None:
    used = {name for p in FILES for _, name in private_torch_names(p)}
    assert used >= KNOWN, f"nothing uses {sorted(KNOWN - used)}"


# — fake tensors: the sketch runs models on them —


def _plus_one(p: Tensor) -> None:
    p.grad += 1


def _to_zero(p: Tensor) -> None:
    p.grad.zero_()


def test_hooks_on_gradients_are_in_two_tables_of_the_parameter() -> None:
    parameter, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    handle = parameter.register_hook(lambda g: g * 3)
    parameter.register_post_accumulate_grad_hook(_plus_one)
    before, after = torch_private.gradient_hooks(parameter)
    torch_private.set_gradient_hooks(parameter, OrderedDict(), OrderedDict())
    torch_private.set_gradient_hooks(other, before, after)
    (parameter.sum() + other.sum()).backward()
    assert parameter.grad.tolist() == [1, 1] and other.grad.tolist() == [4, 4]
    handle.remove()  # by the table, whose parameter is another now
    other.grad = None
    other.sum().backward()
    assert other.grad.tolist() == [2, 2] and torch_private.gradient_hooks(nn.Parameter(torch.ones(2))) == (None, None)
    parameter.register_post_accumulate_grad_hook(_to_zero)
    parameter.sum().backward()
    assert parameter.grad.tolist() == [0, 0]


@contract("torch._subclasses.fake_tensor.FakeTensorMode")
def test_fake_tensors_compute_shapes_beside_real_parameters() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    before = model[1].running_mean.clone()
    with torch_private.FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        x = mode.from_tensor(torch.ones(3, 6))
        y = model(x)
    assert isinstance(x, torch._subclasses.FakeTensor) and isinstance(y, torch._subclasses.FakeTensor)
    assert y.shape == (3, 4) and y.device == torch.device("cpu")
    assert torch.equal(model[1].running_mean, before), "a fake run must not touch real buffers"


@pytest.mark.parametrize("look", [lambda x: x.sum().item(), lambda x: bool(x.sum() > 0), lambda x: x.tolist()])
def test_looking_at_a_fake_value_raises_what_the_sketch_catches(look: Any) -> None:
    with torch_private.FakeTensorMode() as mode, pytest.raises(FAKE_FAILURES):
        look(mode.from_tensor(torch.ones(3)))


# — operators that draw random numbers —


class _Seen(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.rows.append((func, args))
        return func(*args, **(kwargs or {}))


@contract("torch.utils._python_dispatch.TorchDispatchMode")
def test_a_dispatch_mode_sees_operators_under_composites() -> None:
    with _Seen() as seen:
        nn.functional.rrelu(torch.ones(4), training=True)
    names = [func.name() for func, _ in seen.rows]
    assert "aten::rrelu_with_noise" in names or "aten::rrelu_with_noise_functional" in names, names
    assert all("::" in name for name in names)


@contract("torch._ops.OpOverload")
def test_what_a_dispatch_mode_is_given_is_an_overload() -> None:
    with _Seen() as seen:
        torch.ones(2) + 1
    (func, *_) = (func for func, _ in seen.rows if func.name() == "aten::add.Tensor")
    assert (
        isinstance(func, torch_private.OpOverload)
        and func.namespace == "aten"
        and func.overloadpacket is torch.ops.aten.add
    )


def test_a_dispatch_mode_sees_collectives() -> None:
    """A rank's record of traffic reads operators of the namespace c10d: name, and tensors in the first or second argument.

    In a group without threads: a gloo group that ends with its last reference, in a Python frame, may wait forever for a
    thread of its own that waits for Python.
    """
    torch_private.init_fake_world(0, 1)
    try:
        with _Seen() as seen:
            torch.distributed.all_reduce(torch.ones(5))
            torch.distributed.all_gather([torch.empty(3)], torch.ones(3))
    finally:
        torch.distributed.destroy_process_group()
    rows = {f.name().partition(".")[0]: args for f, args in seen.rows if f.name().startswith("c10d::")}
    assert list(rows) == ["c10d::allreduce_", "c10d::allgather_"]
    assert rows["c10d::allreduce_"][0][0].shape == (5,)
    assert rows["c10d::allgather_"][1][0].shape == (3,)


SEEDED_OPERATORS = (
    "bernoulli_.float bernoulli normal_ uniform_ exponential_ random_ randn_like rand_like randint native_dropout "
    "rand randn randperm multinomial cauchy_ log_normal_ geometric_ rrelu_with_noise"
)


@pytest.mark.parametrize("name", SEEDED_OPERATORS.split())
def test_operators_that_draw_carry_the_tag(name: str) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
    operator = operator or getattr(getattr(torch.ops.aten, packet), getattr(torch.ops.aten, packet).overloads()[0])
    assert is_seeded(operator)


@pytest.mark.parametrize("name", ["add", "mul", "mm", "native_layer_norm", "copy_", "empty_like", "native_batch_norm"])
def test_operators_that_do_not_draw_lack_it(name: str) -> None:
    packet = getattr(torch.ops.aten, name)
    assert not any(is_seeded(getattr(packet, overload)) for overload in packet.overloads())


def test_what_is_no_operator_does_not_draw() -> None:
    assert not is_seeded(torch.nn.functional.dropout) and not is_seeded(None)


@contract("…._schema")
def test_an_operator_names_its_arguments_and_defaults() -> None:
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default._schema.arguments
    dropout = next(a for a in attention if a.name == "dropout_p")
    assert dropout.has_default_value() and dropout.default_value == 0.0
    norm = [a.name for a in torch.ops.aten.native_batch_norm.default._schema.arguments]
    assert "training" in norm
    written = [a.name for a in torch.ops.aten.add_.Tensor._schema.arguments if a.alias_info and a.alias_info.is_write]
    assert written == ["self"]


@contract("torch._VF.lstm", "torch._VF.gru", "torch._VF.rnn_tanh", "torch._VF.rnn_relu")
@pytest.mark.parametrize(
    ("layer", "function"),
    [
        (nn.LSTM(2, 3, 2, dropout=0.5), torch._VF.lstm),
        (nn.GRU(2, 3, 2, dropout=0.5), torch._VF.gru),
        (nn.RNN(2, 3, 2, dropout=0.5), torch._VF.rnn_tanh),
        (nn.RNN(2, 3, 2, dropout=0.5, nonlinearity="relu"), torch._VF.rnn_relu),
    ],
    ids=lambda v: getattr(v, "__name__", type(v).__name__),
)
def test_recurrent_layers_call_what_the_randomness_replaces(layer: nn.Module, function: Any) -> None:
    called = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        layer(torch.ones(4, 1, 2))
    assert function in called


# — trees —


@contract("torch.utils._pytree.tree_leaves", "torch.utils._pytree.tree_map", "torch.utils._pytree.tree_map_only")
def test_trees_of_tuples_dicts_and_none() -> None:
    pytree = torch.utils._pytree
    tree = {"b": (torch.ones(1), 2), "a": [None, torch.zeros(2)]}
    assert [type(leaf) for leaf in pytree.tree_leaves(tree)] == [Tensor, int, type(None), Tensor]
    doubled = pytree.tree_map_only(Tensor, lambda t: t * 2, tree)
    assert doubled["b"][0].item() == 2.0 and doubled["b"][1] == 2 and list(doubled) == ["b", "a"]
    assert pytree.tree_map(lambda v: 0, [[1, 2], [3]]) == [[0, 0], [0]]


@contract("torch.utils._pytree.TreeSpec", "torch.utils._pytree.tree_flatten", "torch.utils._pytree.tree_unflatten")
def test_a_flattened_tree_comes_back() -> None:
    pytree = torch.utils._pytree
    tree = {"logits": torch.ones(2), "hidden": (torch.zeros(1), None)}
    flat, spec = pytree.tree_flatten(tree)
    back = pytree.tree_unflatten(flat, spec)
    assert list(back) == ["logits", "hidden"] and back["hidden"][1] is None and back["logits"] is tree["logits"]


@dataclasses.dataclass
class Output:
    """The output of many models."""

    logits: Tensor
    state: Any = None


class Holder:
    """A class that torch does not know."""

    def __init__(self, h: Tensor):
        self.h = h


@contract("torch.utils._pytree.register_pytree_node")
def test_trees_learn_a_class() -> None:
    kind, a = Holder, torch.ones(1)
    assert len(dataclass_leaves(kind(a))) == 1 and not isinstance(dataclass_leaves(kind(a))[0], Tensor)
    torch_private.register_pytree_node(kind, lambda x: ([x.h], None), lambda values, _: kind(*values))
    assert dataclass_leaves((kind(a), 1))[0] is a
    assert torch.utils._pytree.tree_map_only(Tensor, lambda t: t + 1, kind(a)).h.item() == 2


@contract("torch.utils._pytree.register_dataclass")
def test_leaves_look_into_dataclasses() -> None:
    a, b = torch.ones(1), torch.zeros(2)
    for _ in range(2):  # registered the first time, known the second
        assert [leaf for leaf in dataclass_leaves({"out": Output(a, (b,))}) if isinstance(leaf, Tensor)] == [a, b]
    flat, spec = torch.utils._pytree.tree_flatten(Output(a))
    assert torch.utils._pytree.tree_unflatten(flat, spec).logits is a


# — modules —


@contract("torch.nn.modules.batchnorm._BatchNorm", "…._check_input_dim")
def test_batch_norms_have_one_base_and_check_their_input() -> None:
    base = torch.nn.modules.batchnorm._BatchNorm
    assert all(issubclass(kind, base) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm))
    assert not any(issubclass(kind, base) for kind in (nn.InstanceNorm2d, nn.GroupNorm, nn.LayerNorm))
    with pytest.raises(ValueError, match="4D"):
        nn.BatchNorm2d(3)._check_input_dim(torch.ones(2, 3))
    norm = nn.BatchNorm1d(3)
    names = ("eps", "momentum", "affine", "track_running_stats", "running_mean", "running_var", "num_batches_tracked")
    assert all(hasattr(norm, name) for name in names)


@contract("torch.nn.modules.dropout._DropoutNd")
def test_dropouts_have_one_base() -> None:
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    assert all(issubclass(kind, torch.nn.modules.dropout._DropoutNd) for kind in kinds)


@contract("…._parameters")
def test_a_module_keeps_its_parameters_in_a_dict() -> None:
    layer = nn.Linear(2, 3, bias=False)
    assert list(layer._parameters) == ["weight", "bias"] and layer._parameters["bias"] is None
    assert layer._parameters["weight"] is layer.weight


@contract("…._buffers")
def test_a_module_keeps_its_buffers_in_a_dict() -> None:
    norm = nn.BatchNorm1d(2)
    assert list(norm._buffers) == ["running_mean", "running_var", "num_batches_tracked"]
    assert norm._buffers["running_mean"] is norm.running_mean
    norm._buffers["running_mean"] = torch.full((2,), 5.0)
    assert norm.running_mean.tolist() == [5.0, 5.0], "the dict is the module's own, not a copy"


# — the step, the launcher, compilation —


@contract("torch._C._autograd._top_saved_tensors_default_hooks")
def test_a_checkpointed_function_knows_that_it_is_one() -> None:
    """Only during its forward pass, not during recomputation, and not under other hooks on saved tensors."""
    frames = []

    def body(x: Tensor) -> Tensor:
        frames.append(checkpoint_frame())
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False)
    z = torch.utils.checkpoint.checkpoint(body, y, use_reentrant=False)
    assert None not in frames and frames[0] is not frames[1]
    z.sum().backward()
    assert len(frames) == 4 and frames[2:] == [None, None]
    with torch.autograd.graph.save_on_cpu():
        assert checkpoint_frame() is None
    assert checkpoint_frame() is None


@contract("torch.utils.checkpoint._Holder", "torch.utils.checkpoint._Handle")
def test_backward_passes_of_a_group_recompute_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they reach the same nodes. Without a group, every pass recomputes."""
    monkeypatch.setattr(torch.utils.checkpoint, "_Holder", torch.utils.checkpoint._Holder)
    recompute_once()
    runs = []

    def body(x: Tensor, w: Tensor) -> Tensor:
        runs.append(1)
        return (x @ w).sin() @ w

    x, w = (torch.randn(3, 3, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad(((x @ w).sin() @ w).sum(), (x, w))
    y = torch.utils.checkpoint.checkpoint(body, x, w, use_reentrant=False).sum()
    for group, times in ((GraphExecGroup(), 2), (GraphExecGroup(), 3), (nullcontext(), 5)):
        found = []
        for leaf in (x, w):
            with group:
                found += torch.autograd.grad(y, leaf, retain_graph=True)
        assert len(runs) == times and all(map(torch.equal, found, expected))


@contract("torch._foreach_mul_")
def test_many_tensors_are_scaled_in_place_by_a_number_or_a_tensor() -> None:
    gradients = [torch.ones(2), torch.full((1, 3), 2.0)]
    torch._foreach_mul_(gradients, 0.5)
    torch._foreach_mul_(gradients, torch.tensor(0.5))
    assert gradients[0].tolist() == [0.25, 0.25] and gradients[1].tolist() == [[0.5, 0.5, 0.5]]


@contract("torch._foreach_copy_")
def test_many_tensors_are_written_in_place() -> None:
    kept = [torch.zeros(2), torch.zeros((), dtype=torch.int64)]
    torch._foreach_copy_(kept, [torch.tensor([1.0, 2.0]), torch.tensor(3)])
    assert [t.tolist() for t in kept] == [[1.0, 2.0], 3]


@contract("torch._dynamo")
def test_dynamo_can_be_imported_before_a_fork() -> None:
    """The launcher imports it once, so that not every rank does. It must not touch CUDA."""
    import torch._dynamo

    assert hasattr(torch._dynamo, "reset") and not torch.cuda.is_initialized()


@contract("torch._disable_dynamo")
def test_what_is_uncompiled_is_not_looked_into() -> None:
    seen: list[bool] = []
    inside = torch_private.uncompiled(lambda x: x + (seen.append(torch.compiler.is_compiling()) or 1))
    assert torch.compile(lambda x: inside(2 * x), backend="eager")(torch.ones(1)).item() == 3 and seen == [False]


def mask_arguments(dim: int | None) -> tuple[Any, ...]:
    where = torch.tensor([0, 2, 3, 5])  # seed, step, first sample, samples
    return torch.ones(5, 7), where, "drop#1#1", dim, 0.25


def test_the_mask_is_a_proper_operator() -> None:
    x, where, place, dim, p = mask_arguments(0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.plait.mask.default, (x, where, place, dim, p), test_utils=checks)


@pytest.mark.parametrize("dim", [0, 1, -1, None])
def test_the_compiled_mask_is_the_uncompiled_one(dim: int | None) -> None:
    arguments = mask_arguments(dim)
    expected = mask_op(*arguments)
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(lambda x, where: x * mask_op(x, where, *arguments[2:]), backend=keep, fullgraph=True)
    assert torch.equal(compiled(*arguments[:2]), expected)
    assert sum("mask" in str(node.target) for g in graphs for node in g.graph.nodes if node.op == "call_function") == 1
    assert expected.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]


def test_hooks_that_are_registered_are_counted() -> None:
    """Hooks on modules and on tensors, also after their removal."""
    before = torch_private.count_hooks()
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: None).remove()
    layer.weight.register_hook(lambda grad: grad).remove()
    assert torch_private.count_hooks() == before + 2


@pytest.mark.filterwarnings("default")  # torch's compiler warns about its own internals
@contract("torch._dynamo.config", "torch._dynamo.utils.counters", "…._forward_pre_hooks", "…._forward_hooks")
def test_what_was_compiled_is_counted_and_hooks_are_compared() -> None:
    """Two modules of a class share compiled code. One with other hooks gets its own. Beyond the limit a function is no longer compiled."""
    import torch._dynamo.config as config

    before = config.recompile_limit, config.accumulated_recompile_limit, config.skip_nnmodule_hook_guards
    torch.compiler.reset()
    graphs, given_up = torch_private.count_compiled()
    seen: list[str] = []
    one, other, hooked = (torch.nn.Sequential(torch.nn.Linear(2, 2)) for _ in range(3))
    hooked[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    hooked[0].register_forward_hook(lambda *_: seen.append("after"))
    assert [len(hooks) for hooks in torch_private.forward_hooks(hooked[0])] == [1, 1]
    for hooks in torch_private.forward_hooks(hooked[0]):
        hooks.update({key: torch.compiler.disable(hook) for key, hook in hooks.items()})
    run = torch.compile(lambda module, x, by: module[0](x) * by, backend="eager", dynamic=False)
    try:
        torch_private.set_recompile_limit(10)
        for module in (one, other):
            run(module, torch.ones(2, 2), 1.0)
        assert torch_private.count_compiled() == (graphs + 1, given_up)
        run(hooked, torch.ones(2, 2), 1.0)
        assert seen == ["before", "after"] and torch_private.count_compiled()[0] > graphs + 1
        for by in range(2, 12):
            run(one, torch.ones(2, 2), float(by))
        assert torch_private.count_compiled()[1] > given_up
    finally:
        config.recompile_limit, config.accumulated_recompile_limit, config.skip_nnmodule_hook_guards = before
        torch.compiler.reset()


# — measuring units: which tensors share memory, and which were written —


@contract("torch._subclasses.fake_tensor.FakeTensor", "…._cdata")
def test_views_of_real_and_of_fake_tensors_share_a_storage() -> None:
    mode = torch_private.FakeTensorMode(allow_non_fake_inputs=True)
    weight = nn.Parameter(torch.ones(3, 4))
    known = mode.from_tensor(weight)
    with mode:
        turned = weight.t()
    assert isinstance(turned, torch_private.FakeTensor) and turned.fake_mode is mode
    assert torch_private.storage_key(turned) == torch_private.storage_key(known), (
        "a view of a parameter is known as such"
    )
    assert (
        torch_private.storage_key(weight[0])
        == torch_private.storage_key(weight)
        != torch_private.storage_key(weight.clone())
    )


@contract("torch._subclasses.fake_tensor.FakeTensorMode")
def test_a_copied_fake_tensor_stays_in_its_mode() -> None:
    """A copy of a mode frees torch's weak references to storages twice, which damages memory (valgrind: invalid read)."""
    mode = torch_private.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        module = nn.Module()
        module.register_buffer("table", torch.tensor(1.0))
        assert module.table.fake_mode is mode
        assert mode.fake_tensor_converter.constant_storage_mapping, "what is freed twice"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch queries the data pointer of a fake tensor
        assert copy.deepcopy(module).table.fake_mode is mode


@contract("…._version")
def test_a_write_in_place_moves_the_version() -> None:
    x = torch.ones(3)
    before = torch_private.version(x)
    x[1:].add_(1)
    assert torch_private.version(x) > before
    with torch.inference_mode():
        assert torch_private.version(torch.ones(3)) == 0


@contract("…._BaseDataLoaderIter", "…._DatasetKind", "…._dataset_kind")
def test_a_loader_reads_indices_from_its_sampler_and_rows_from_one_iterator() -> None:
    """Functions that `plait prove` replaces in a script's process: the getter of the indices, and the step of every iterator."""
    iterator_class, stream = data_loader._BaseDataLoaderIter, data_loader._DatasetKind.Iterable
    rows, streamed = DataLoader(TensorDataset(torch.arange(6)), batch_size=2), DataLoader(_Stream(), batch_size=2)
    assert list(DataLoader._index_sampler.fget(rows)) == [[0, 1], [2, 3], [4, 5]]
    assert rows._dataset_kind != stream and streamed._dataset_kind == stream
    for loader in (rows, streamed):
        iterator = iter(loader)
        assert type(iterator).__next__ is iterator_class.__next__ and iterator_class.__next__(iterator) is not None


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(6)


# — collectives in a compiled graph —


@contract("torch.distributed._functional_collectives")
def test_collectives_that_give_a_new_tensor() -> None:
    def rank(place: Any) -> dict[str, Any]:
        group, mine = place.connect(torch.device("cpu")), torch.tensor([1.0, 10.0]) * (place.rank + 1)
        rows = torch_private.all_gather_tensor(mine[None], 0, group)
        return {
            "rows": rows.tolist(),
            "sum": torch_private.all_reduce(mine, "sum", group).tolist(),
            "mine": mine.tolist(),
        }

    found = run_ranks(rank, 2)
    assert all(f["rows"] == [[1.0, 10.0], [2.0, 20.0]] and f["sum"] == [3.0, 30.0] for f in found)
    assert found[1]["mine"] == [2.0, 20.0]


# — sharding: FSDP2's collectives, its parameters, and what runs in backward —


@contract(
    "torch.distributed.fsdp._fully_shard._fsdp_common",
)
@pytest.mark.skipif(not hasattr(torch_private.fsdp_placement(), "ShardPlacementResult"), reason="torch 2.11: one mesh for all parameters (H010)")
def test_fsdp_takes_collectives_and_meshes_of_ours() -> None:
    """A parameter may be on a mesh of its own. Each mesh of a module has its own collectives, and a hook after its sums
    (tests/device checks that FSDP2 calls it, and where)."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    torch_has = torch_private.fsdp_placement()
    torch_private.init_fake_world(0, 4)
    try:
        groups = [torch.distributed.new_group(ranks) for ranks in ([0, 1, 2, 3], [0, 2])]
        whole, half = (DeviceMesh.from_group(group, "cpu") for group in groups)
        apart = torch_has.FSDPMeshInfo(half, shard_mesh_dim=0)
        module = nn.Linear(8, 8)
        module = fully_shard(
            module,
            mesh=whole,
            shard_placement_fn=lambda p: torch_has.ShardPlacementResult(Shard(1), apart) if p.dim() == 2 else None,
        )
        shapes = {n: torch_private.local_tensor(p).shape for n, p in module.named_parameters()}
        assert shapes == {"weight": (8, 4), "bias": (2,)}
        torch_private.set_fsdp_comms(module, "scatter", "gather")
        found = module._get_fsdp_state()._fsdp_param_groups
        assert len(found) == 2 and {(g._reduce_scatter_comm, g._all_gather_comm) for g in found} == {
            ("scatter", "gather")
        }
        assert all(g.unshard_async_op for g in found)
        torch_private.hook_after_reduce(module, print)
        assert all(g._all_reduce_hook is print for g in found)
    finally:
        torch.distributed.destroy_process_group()


@contract(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState",
    "…._get_fsdp_state",
    "…._state_ctx",
    "…._fsdp_param_groups",
    "…._root_post_backward_final_callback",
)
def test_what_ends_the_backward_of_a_sharded_model_is_there() -> None:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    state = FSDPState()
    assert callable(FSDPModule._get_fsdp_state) and callable(FSDPParamGroup.post_backward)
    assert state._state_ctx.all_states == [] and torch_private._param_groups(state) == []
    assert callable(state._root_post_backward_final_callback)


@contract("…._fsdp_param_group")
def test_a_sharded_module_has_groups_of_parameters_or_one() -> None:
    """torch 2.11 stores at most one, in an attribute for one. Later versions store a list."""
    several = types.SimpleNamespace(_fsdp_param_groups=["a", "b"])
    assert torch_private._param_groups(several) == ["a", "b"]
    assert torch_private._param_groups(types.SimpleNamespace(_fsdp_param_group="a")) == ["a"]
    assert torch_private._param_groups(types.SimpleNamespace(_fsdp_param_group=None)) == []


@contract("…._prefetch_unshard")
@pytest.mark.parametrize("built_in", [True, False], ids=["as torch is", "as torch 2.11 is"])
def test_a_sharded_module_is_gathered_ahead_on_streams_of_its_own(built_in: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group starts once, for a forward pass, not asynchronously. FSDP2 then uses its own streams."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch_private.init_fake_world(0, 2)
    try:
        model = Apart()
        for module in (model.a, model.b, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        model(torch.ones(2, 3), "ab")
        (group,) = torch_private._param_groups(model.b._get_fsdp_state())
        model.b.reshard()
        asked: list[tuple[bool, str]] = []
        streams = type(group.comm_ctx).get_all_gather_streams
        noted = lambda *how: asked.append((how[1], how[2].name)) or streams(*how)  # noqa: E731
        monkeypatch.setattr(type(group.comm_ctx), "get_all_gather_streams", noted)
        state = model.b._get_fsdp_state() if built_in else types.SimpleNamespace(_fsdp_param_group=group)
        monkeypatch.setattr(model.b, "_get_fsdp_state", lambda: state)
        for _ in range(2):
            torch_private.prefetch_gather(model.b)
        assert asked == [(False, "FORWARD")] and group._all_gather_result is not None
        assert group.comm_ctx.all_gather_stream is streams(group.comm_ctx, False, group._training_state.FORWARD)[1]
        assert group._training_state.name == "IDLE"
    finally:
        torch.distributed.destroy_process_group()


class Apart(nn.Module):
    """Two layers. The caller names those that run."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, names: str) -> Tensor:
        for name in names:
            x = self.get_submodule(name)(x)
        return x


@pytest.mark.parametrize("built_in", [True, False], ids=["as torch is", "as torch 2.11 is"])
def test_a_parameter_that_one_rank_left_out_is_summed(built_in: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not built_in:
        monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)

    def target(place: Any) -> dict[str, Any]:
        place.connect(torch.device("cpu"))
        torch.manual_seed(0)
        alone, model = Apart(), Apart()
        model.load_state_dict(alone.state_dict())
        model = fully_shard(model, mesh=init_device_mesh("cpu", (place.world,)))
        model.set_gradient_divide_factor(1.0)
        model.set_force_sum_reduction_for_comms(True)
        torch_private.reduce_unused_params(model)
        for names in ("a", "ab"):
            alone(torch.ones(2, 3), names).sum().backward()
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 3), "ab"[: place.rank + 1]).sum().backward()
        apart = {n: p.grad.full_tensor() - alone.get_parameter(n).grad for n, p in model.named_parameters()}
        return {name: float(d.abs().max()) for name, d in apart.items()}

    for found in run_ranks(target, 2):
        assert len(found) == 4 and max(found.values()) < 1e-6


@contract("…._unsharded_param")
def test_gradients_in_16_bits_are_summed_in_32() -> None:
    """Micro-batches between which torch's own hook does not run, as in a stage, and a parameter that the last one did not use."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def target(place: Any) -> dict[str, Any]:
        place.connect(torch.device("cpu"))
        torch.manual_seed(0)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        model = fully_shard(Apart(), mesh=init_device_mesh("cpu", (place.world,)), mp_policy=policy)
        torch_private.reduce_unused_params(model)
        model.set_requires_gradient_sync(False)
        formats, adds = [], {}
        for names in ("a", "a", "ab"):
            loss = model(torch.rand(2, 3), names).sum()
            for n, p in model.named_parameters():
                adds.setdefault(n, torch_private.make_wide_sum(model, p))
            loss.backward()
            [add() for add in adds.values()]
            held = [p for g in torch_private._param_groups(model._get_fsdp_state()) for p in g.fsdp_params]
            formats.append(
                [str(p.unsharded_accumulated_grad.dtype) for p in held if p.unsharded_accumulated_grad is not None]
            )
        model.set_requires_gradient_sync(True)
        torch_private.end_backward(model)
        return {"formats": formats, "summed": [str(p.grad.dtype) for p in model.parameters()]}

    for found in run_ranks(target, 2):
        assert found["formats"] == [["torch.float32"] * 2, ["torch.float32"] * 2, ["torch.float32"] * 4]
        assert found["summed"] == ["torch.float32"] * 4


@contract("torch._C.DisableTorchFunction")
def test_modes_can_be_left_out_for_a_moment() -> None:
    seen: list[Any] = []

    class Seeing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Seeing():
        assert torch_private.version(torch.ones(2)) == 0
        with torch_private.no_functions():
            torch.zeros(2).add_(1)
    assert [f.__name__ for f in seen] == ["ones"]


@contract("torch._C._has_storage")
def test_tensors_inside_of_a_transform_have_no_memory() -> None:
    found = list[bool]()

    def inside(x: torch.Tensor) -> torch.Tensor:
        found.append(torch_private.has_storage(x))
        return x.sum()

    torch.func.vmap(inside)(torch.ones(2, 3))
    torch.func.grad(inside)(torch.ones(3))
    assert found == [False, False] and torch_private.has_storage(torch.ones(3)[1:])


@contract("…._is_view")
def test_a_view_is_known_as_one() -> None:
    x = torch.ones(4, requires_grad=True) * 2
    assert torch_private.is_view(x[:2]) and not torch_private.is_view(x) and not torch_private.is_view(x[:2].clone())


@contract("…._apply")
def test_apply_changes_tensors_in_place_of_a_module() -> None:
    model = nn.Sequential(nn.Linear(2, 3, device="meta"), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(7.0)
    materialize(model, torch.device("cpu"))
    assert model[0].weight.device.type == "cpu" and model[1].running_mean.tolist() == [7.0] * 3
    hollow = nn.Linear(2, 3, device="meta")
    convert_module(hollow, torch.device("cpu"), torch.float64)
    assert hollow.weight.is_meta and hollow.weight.dtype == torch.float64


@contract("torch._C._current_graph_task_id")
def test_it_is_known_that_backward_runs() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(torch_private.is_in_backward()))
    y.sum().backward()
    assert seen == [True] and not torch_private.is_in_backward()


@contract("torch._C._SetExcludeDispatchKeyGuard", "torch._C.DispatchKey.ADInplaceOrView")
def test_an_alias_made_in_a_dispatch_mode_sees_writes() -> None:
    held = []

    class Mode(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.mm.default:
                held.append((torch_private.alias(out), torch_private.version(out)))
            return out

    with Mode():
        y = torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        y.sigmoid_()
    ((kept, number),) = held
    assert torch_private.version(kept) > number and kept.data_ptr() == y.data_ptr()


@contract(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
def test_the_attention_kernel_for_cpus_gives_log_sums(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, generator=g, dtype=dtype) for heads in (4, 2, 2))
    mask = torch.zeros(1, 1, 5, 5, dtype=dtype).masked_fill_(torch.ones(5, 5, dtype=torch.bool).triu(0), -torch.inf)
    out, lse = torch_private.flash_cpu[0](q, k, v, 0.0, False, attn_mask=mask, scale=0.5)
    scores = (q @ k.repeat_interleave(2, 1).mT).double() * 0.5 + mask
    assert not out[:, :, 0].any() and not lse[:, :, 0].any(), "the first query sees no key"
    near = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    assert torch.allclose(lse[:, :, 1:].double(), scores.logsumexp(-1)[:, :, 1:], atol=near)
    grads = torch_private.flash_cpu[1](torch.ones_like(out), q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=0.5)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape] and all(g.isfinite().all() for g in grads)


@contract(
    "torch.ops.aten._scaled_dot_product_flash_attention", "torch.ops.aten._scaled_dot_product_flash_attention_backward",
    "torch.ops.aten._scaled_dot_product_efficient_attention", "torch.ops.aten._scaled_dot_product_efficient_attention_backward",
    "torch.ops.aten._scaled_dot_product_cudnn_attention", "torch.ops.aten._scaled_dot_product_cudnn_attention_backward",
)  # fmt: skip
def test_the_attention_kernels_for_gpus_take_what_they_are_given() -> None:
    """By their schemas. tests/device/test_attention_kernels.py compares shapes and formats."""
    known = ["query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    names = lambda op: [a.name for a in op.default._schema.arguments]  # noqa: E731
    gives = lambda op: [a.name for a in op.default._schema.returns][:2]  # noqa: E731
    flash, efficient, cudnn = torch_private.flash, torch_private.memory_efficient, torch_private.cudnn
    assert names(flash[0]) == [*known[:3], "dropout_p", "is_causal", "return_debug_mask", "scale"]
    assert names(flash[1]) == ["grad_out", *known, "philox_seed", "philox_offset", "scale"]
    assert names(efficient[0]) == [*known[:3], "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "scale"]
    assert names(efficient[1]) == [
        "grad_out_", *known[:3], "attn_bias", "out", "logsumexp", "philox_seed", "philox_offset", "dropout_p", "grad_input_mask",
        "is_causal", "scale",
    ]  # fmt: skip
    assert names(cudnn[0]) == [*names(efficient[0])[:-1], "return_debug_mask", "scale"]
    assert names(cudnn[1]) == ["grad_out", *known[:5], "philox_seed", "philox_offset", "attn_bias", *known[5:], "scale"]
    assert gives(flash[0]) == gives(cudnn[0]) == ["output", "logsumexp"] and gives(efficient[0]) == ["output", "log_sumexp"]


@contract("torch._fused_sdp_choice")
def test_torch_says_which_attention_kernel_it_takes() -> None:
    q = torch.zeros(1, 1, 4, 8)
    kinds = torch.nn.attention.SDPBackend
    asked = lambda *mask: torch_private.attention_choice(q, q, q, *mask, 0.0, False, scale=0.5, enable_gqa=False)  # noqa: E731
    assert asked(None) == int(kinds.FLASH_ATTENTION)
    with torch.nn.attention.sdpa_kernel(kinds.MATH):
        assert asked(None) == int(kinds.MATH)


@contract("torch.Tensor._make_wrapper_subclass", "torch._C.DisableTorchFunctionSubclass")
def test_a_facade_has_a_shape_and_no_numbers() -> None:
    class Front(torch_private.WrapperTensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch_private.no_subclass_functions():
                return func(*args, **(kwargs or {}))

    made = torch_private.WrapperTensor.create(Front, torch.zeros(2, 3, dtype=torch.float64), [2, 9])
    assert isinstance(made, Front) and made.shape == (2, 9) and made.dtype == torch.float64
    with pytest.raises(NotImplementedError):
        made + 1


@contract("torch.utils._pytree.tree_flatten_with_path", "torch.utils._pytree.keystr")
def test_leaves_have_names() -> None:
    found, spec = torch_private.leaves_with_paths(((1, [2]), {"a": {"b": 3}}))
    assert found == [("[0][0]", 1), ("[0][1][0]", 2), ("[1]['a']['b']", 3)]
    assert torch_private.tree_unflatten([4, 5, 6], spec) == ((4, [5]), {"a": {"b": 6}})


# — dry runs: a process group of simulated ranks, on tensors without values —


@contract("torch.testing._internal.distributed.fake_pg.FakeStore")
def test_a_world_can_be_pretended_and_its_groups_be_found_in_calls() -> None:
    seen: list[Any] = []

    class Watch(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.extend((func.name(), g) for g in map(torch_private.find_process_group, args) if g is not None)
            return func(*args, **(kwargs or {}))

    torch_private.init_fake_world(3, 4096)
    try:
        group = torch.distributed.new_group([3, 7, 9])
        x = torch.ones(2)
        with Watch():
            torch.distributed.all_reduce(x, group=group)
        assert torch.distributed.get_world_size() == 4096 and group.rank() == 0 and group.size() == 3
        assert x.tolist() == [1.0, 1.0]
        assert [(name, g.group_name) for name, g in seen] == [("c10d::allreduce_", group.group_name)]
    finally:
        torch.distributed.destroy_process_group()
    assert torch_private.find_process_group(3) is None and torch_private.find_process_group(x) is None


@contract("torch.distributed._meta_registrations")
def test_collectives_of_fake_tensors_do_not_draw_from_pythons_generator() -> None:
    torch_private.init_fake_world(0, 2)
    try:
        before = random.getstate()
        with torch_private.FakeTensorMode():
            torch.distributed.all_reduce(torch.ones(2))
            torch.distributed.broadcast(torch.ones(2, device="meta"), 0)
        assert random.getstate() == before
    finally:
        torch.distributed.destroy_process_group()


@contract("torch.ops.aten._local_scalar_dense.default")
@pytest.mark.parametrize("look", [lambda x: x[0].item(), lambda x: x.tolist(), lambda x: bool(x[0] > 0)])
def test_who_asks_a_fake_tensor_for_a_number_calls_one_operator(look: Any) -> None:
    seen: list[Any] = []

    class Watch(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return 1 if func is torch_private.item_op else func(*args, **(kwargs or {}))

    with torch_private.FakeTensorMode() as mode:
        x = mode.from_tensor(torch.ones(3))
    with Watch():
        look(x)
    assert torch_private.item_op in seen


@contract("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam", "…._spec")
def test_fsdp_looks_again_at_its_parts_before_the_first_step() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    before = FSDPParam.reset_sharded_param
    with torch_private.keep_fake_shards():
        assert FSDPParam.reset_sharded_param is not before
    assert FSDPParam.reset_sharded_param is before


def test_an_unknown_is_told_from_another_fake_tensor() -> None:
    fakes, unknowns = torch_private.FakeTensorMode(), RemoteFakeMode()
    assert is_remote_fake(unknowns.from_tensor(torch.ones(2)))
    assert not is_remote_fake(fakes.from_tensor(torch.ones(2))) and not is_remote_fake(torch.ones(2))


@contract("torch.ops.aten._grouped_mm.default")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_tensors_of_any_format_are_multiplied_by_groups(dtype: torch.dtype) -> None:
    with torch_private.FakeTensorMode():
        rows, ends = torch.empty(64, 32, dtype=dtype, requires_grad=True), torch.empty(8, dtype=torch.int32)
        matrices = torch.empty(8, 48, 32, dtype=dtype, requires_grad=True)
        made = torch.nn.functional.grouped_mm(rows, matrices.mT, offs=ends)
        made.square().sum().backward()
    assert made.dtype == dtype and made.shape == (64, 48)
    assert rows.grad is not None and rows.grad.shape == rows.shape and matrices.grad is not None and matrices.grad.shape == matrices.shape


@contract("torch._C._get_dispatch_mode", "torch._C._TorchDispatchModeKey.FAKE")
def test_the_mode_for_fake_tensors_comes_after_others_and_is_known() -> None:
    seen: list[Any] = []

    class Watch(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(torch_private.active_fake_mode())
            return func(*args, **(kwargs or {}))

    fakes = torch_private.FakeTensorMode()
    with Watch(), fakes:
        made = torch.empty(3)
    assert seen == [fakes] and made.fake_mode is fakes and torch_private.active_fake_mode() is None


@contract("torch._ops.HigherOrderOperator")
def test_operators_of_higher_order_are_told_and_pass_modes() -> None:
    class Seeing(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    names, x = [], torch.ones(3, requires_grad=True)

    def run(name, made, args, kwargs):
        names.append(name)
        return made(*args, **kwargs)

    with torch_private.intercept_compiled(run):
        found = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))
    with Seeing():
        found.sum().backward()
    assert names == ["cond"] and x.grad is not None and x.grad.tolist() == [2.0, 2.0, 2.0]
    before = torch.compile
    with torch_private.intercept_compiled(run):
        assert torch.compile(torch.sin, backend="eager")(torch.zeros(1)).item() == 0.0
    assert names == ["cond"] and torch.compile is before


@contract("torch.utils._python_dispatch._disable_current_modes")
def test_a_tensor_made_without_modes_is_real() -> None:
    with torch_private.FakeTensorMode():
        with torch_private.no_modes():
            assert torch.ones(2).tolist() == [1.0, 1.0]
        assert isinstance(torch.ones(2), torch_private.FakeTensor)


@contract("torch._C._accelerator_setAllocatorSettings")
def test_the_allocator_is_set_up_without_a_device() -> None:
    torch_private.configure_allocator("expandable_segments:True")
    torch_private.configure_allocator("expandable_segments:False")  # torch's own choice
    assert not torch.cuda.is_initialized()


@contract("torch.distributed.distributed_c10d._set_pg_timeout", "torch.distributed.distributed_c10d._world.pg_map")
def test_every_group_is_told_how_long_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, Any]] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        other = dist.new_group([0])
        torch_private.set_group_timeout(timedelta(seconds=7))  # torch knows how
        monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda *given: told.append(given))
        torch_private.set_group_timeout(timedelta(seconds=8))
        assert {group for _, group in told} == {dist.group.WORLD, other} and {t.seconds for t, _ in told} == {8}
    finally:
        dist.destroy_process_group()


@contract("torch.cuda._is_in_bad_fork")
def test_a_fork_knows_whether_cuda_is_lost() -> None:
    assert torch_private.is_cuda_lost() is False


@contract("torch.cuda._device_count_nvml", "torch.cuda._device_count_amdsmi")
def test_devices_by_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's library is queried, never CUDA. Returns None if there is no such library."""
    assert torch_private.devices_by_driver() is None or not torch.cuda.is_initialized()
    for name in ("_device_count_nvml", "_device_count_amdsmi"):
        assert hasattr(torch.cuda, name)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 3)
    assert torch_private.devices_by_driver() == 3
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: -1)
    assert torch_private.devices_by_driver() is None


@pytest.mark.parametrize("kind", (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD))
def test_an_optimizer_fused_later_is_one_made_so(kind: Any) -> None:
    made, later = (nn.Parameter(torch.ones(3)) for _ in range(2))
    one, other = kind([made], lr=0.1, fused=True), kind([later], lr=0.1)
    torch_private.fuse(other)
    known = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
    assert all(getattr(one, name, True) == getattr(other, name) for name in known)
    assert one.param_groups[0]["fused"] is other.param_groups[0]["fused"] is True and torch_private.can_skip_on_inf(other)
    for parameter, optimizer in ((made, one), (later, other)):
        parameter.grad = torch.ones(3)
        optimizer.step()
    assert torch.equal(made, later)
