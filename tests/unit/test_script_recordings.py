"""`plait prove` on recordings: the batches of a step, the rows of an epoch, causes, and the torch functions that it hooks."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset

from plait.config.errors import PlaitError
from plait.proof.probes import Probe
from plait.scripts import recorder, recordings, values
from plait.scripts.differences import StepDifference, check_settings
from plait.scripts.recordings import Readers, Recording, count_surplus, find_faults, list_notes, make_replay


def recorded(tmp_path: Path, events: Sequence[dict], rank: int = 0, world: int = 2, group: Sequence[int] = ()) -> Recording:
    """A recording of these events."""
    start = {"is": "start", "rank": rank, "world": world, "weights": {}, "trainable": [], "batch_norms": []}
    start |= {"group": [*group] or [rank]}
    folder = tmp_path / str(len([*tmp_path.iterdir()]))
    folder.mkdir()
    (folder / "1.jsonl").write_text("\n".join(map(json.dumps, [start, *events])) + '\n{"is": "st')
    return recordings.read_recordings(folder)[0]


def batch(rows: str, epoch: int = 0, loader: int = 0) -> dict:
    indices = [*map(ord, rows)]
    return {"is": "batch", "source": f"{loader} {epoch}", "rows": [*rows], "indices": indices, "labels": None, "stored": {}, "shapes": [[2]]}


def step(number: int, losses: int = 1, optimizer: int = 0, epoch: int = 0, loader: int = 0) -> dict:
    return {
        "is": "step", "step": number, "optimizer": optimizer, "kind": "SGD", "losses": [1.0] * losses,
        "formats": ["float32"], "lr": {}, "decay": {},
        "source": f"{loader} {epoch}", "drew": False, "after": {}, "gradients": {}, "applied": {}, "weights": {}, "buffers": {}, "complete": True,
    }  # fmt: skip


def order(*batches: str, epoch: int = 0, complete: bool = True) -> dict:
    indices = [[ord(i) for i in each] for each in batches]
    return {"is": "epoch", "source": f"0 {epoch}", "order": indices, "own": len(indices[0]), "complete": complete}


def used(recording: Recording) -> list[list[str]]:
    return [["".join(each.rows) for each in batches] for batches in recording.used_batches]


@pytest.mark.parametrize(("events", "expected"), [
    ([batch("a"), step(1), batch("b"), step(2)], [["a"], ["b"]]),
    ([batch("a"), batch("b"), step(1), batch("c"), step(2), step(3)], [["a"], ["b"], ["c"]]),  # one batch is prefetched
    ([batch("a"), batch("b"), step(1, 2), batch("c"), batch("d"), step(2, 2)], [["a", "b"], ["c", "d"]]),  # accumulation
    ([batch("a"), step(1), step(1, 1, 1), batch("b"), step(2), step(2, 1, 1)], [["a"], ["b"]]),  # two optimizers, one batch
    ([batch("a"), batch("b"), step(1), batch("c"), batch("d"), step(2)], [["a", "b"], ["c", "d"]]),  # batches of several ranks, read by one
    ([batch("a"), step(1), batch("b", 1), step(2, epoch=1)], [["a"], ["b"]]),
    ([batch("x", loader=1), batch("a"), step(1), batch("x", loader=1), batch("b"), step(2)], [["a"], ["b"]]),  # an evaluation in between
])  # fmt: skip
def test_batches_belong_to_steps(events: list[dict], expected: list[list[str]], tmp_path: Path) -> None:
    assert used(recorded(tmp_path, events)) == expected


def two(tmp_path: Path, mine: Sequence[dict], other: Sequence[dict], **more: Sequence[int]) -> Readers:
    return Readers.from_ranks((recorded(tmp_path, mine, 0, **more), recorded(tmp_path, [*other, order("", epoch=9)], 1, **more)))


def test_rows_of_ranks_are_joined_micro_batch_by_micro_batch(tmp_path: Path) -> None:
    readers = two(tmp_path, [batch("a"), batch("b"), step(1, 2), order("a", "b")], [batch("c"), batch("d"), step(1, 2), order("c", "d")])
    assert "".join(readers.list_rows(0)) == "acbd"
    assert make_replay(readers) == {"rows": {"0 0": [[ord(i) for i in "acbd"]]}}


@pytest.mark.parametrize(("names", "why"), [
    (((), ()), "contain no tensors"),  # a stream of strings: the reference would read other rows, and a correct script would be reported as different
    ((("x", "y"), ("x",)), "rows of 2 kinds"),
])  # fmt: skip
def test_rows_that_cannot_be_replayed_are_an_error(names: Sequence[Sequence[str]], why: str, tmp_path: Path) -> None:
    stored = [{"indices": None, "stored": {name: ["0", "int64", [2]] for name in each}, "shapes": [[2] for _ in each]} for each in names]
    with pytest.raises(PlaitError, match=why) as raised:
        make_replay(two(tmp_path, [batch("ab") | stored[0], step(1)], [batch("cd") | stored[1], step(1)]))
    assert raised.value.codes == ["E006"]


def test_a_tensor_parallel_group_is_one_reader(tmp_path: Path) -> None:
    readers = two(tmp_path, [batch("a"), step(1)], [batch("a"), step(1)], group=(0, 1))
    assert len(readers.distinct) == 1 and not readers.has_same_rows and not readers.wrong_ranks
    unlike = two(tmp_path, [batch("a"), step(1)], [batch("b"), step(1)], group=(0, 1))
    assert unlike.wrong_ranks == (1,)


@pytest.mark.parametrize(("mine", "other", "code"), [
    ([batch("ab"), step(1), order("ab")], [batch("ab"), step(1), order("ab")], "E022"),
    ([batch("ab"), step(1), order("ab")], [batch("cd"), step(1), order("cd")], None),
    ([batch("a"), step(1), order("a")], [batch("b"), step(1), order("b")], "E025"),
    ([batch("ab"), step(1), order("ab", "cdef")], [batch("bc"), step(1), order("bc", "cdef")], "E024"),
])  # fmt: skip
def test_what_is_wrong_with_rows(mine: list[dict], other: list[dict], code: str | None, tmp_path: Path) -> None:
    readers = two(tmp_path, mine, other)
    reference = recorded(tmp_path, [batch("abcd"), step(1), order("abcd", "efgh" if code == "E024" else "")], 0, 1, [0, 7])
    assert next((each.code for each in find_faults(readers, reference)), None) == code


def test_padding_of_the_last_batch_is_no_fault(tmp_path: Path) -> None:
    readers = two(tmp_path, [batch("ab"), step(1), order("ab", "ea")], [batch("cd"), step(1), order("cd", "fb")])
    reference = recorded(tmp_path, [batch("abcd"), step(1), order("abcd", "ef")], 0, 1, [0, 7])
    assert sorted(count_surplus(readers, reference).elements()) == sorted(str(ord(i)) for i in "ab")
    assert not [*find_faults(readers, reference)]


def test_rows_that_each_order_leaves_out_are_not_called_read_twice(tmp_path: Path) -> None:
    mine = recorded(tmp_path, [batch("ab"), step(1), order("ab", "cd")], 0, 1)
    reference = recorded(tmp_path, [batch("ab"), step(1), order("ab", "ce")], 0, 1)
    (note,) = list_notes(Readers.from_ranks((mine,)), reference)
    assert note == "1 rows are left out of an epoch that the reference reads, and 1 are read that it leaves out (drop_last)"


def test_processes_that_did_not_join_are_no_group(tmp_path: Path) -> None:
    """Each of them is rank 0 of its own group, and no ranks share layers."""
    own = [recorded(tmp_path, [batch(rows), step(1), order(rows)], world=1) for rows in ("ab", "cd")]
    assert Readers.from_ranks(tuple(own)).wrong_ranks == () and len(Readers.from_ranks(tuple(own)).distinct) == 2
    assert Readers.from_ranks((own[0], own[0])).has_same_rows


@pytest.mark.parametrize(("other_rows", "other_weight", "codes"), [
    ("cd", "1", []),  # code other than torch.distributed summed the gradients
    ("cd", "2", ["E021"]),
    ("ab", "1", ["E021", "E022", "E025"]),
])  # fmt: skip
def test_processes_that_share_neither_rows_nor_weights_did_not_join(other_rows: str, other_weight: str, codes: list[str], tmp_path: Path) -> None:
    ranks = [
        recorded(tmp_path, [batch(rows), step(1) | {"weights": {"w": [weight, "float32", [1]]}}], world=1)
        for rows, weight in (("ab", "1"), (other_rows, other_weight))
    ]
    reference = recorded(tmp_path, [batch("abcd"), step(1), order("abcd")], world=1)
    assert [each.code for each in find_faults(Readers.from_ranks(tuple(ranks)), reference)] == codes


def test_rows_of_an_endless_sampler_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_INDICES", 100)
    loader = recorder.RecordedLoader(0, None, {})
    loader.own_indices = ([i, i + 1] for i in itertools.count())
    endless = recorder.LoaderPass(loader)
    endless.draw_rest()
    assert len(endless.order) == 50 and not endless.is_complete
    mine = [batch("ab"), step(1), order("ab", "ab", "ab", complete=False)]
    reference = recorded(tmp_path, [batch("ab"), step(1), order("ab", "cd", "ef", complete=False)], 0, 1)
    readers = Readers.from_ranks((recorded(tmp_path, mine),))
    assert not [*find_faults(readers, reference)] and "not counted" in list_notes(readers, reference)[0]


def test_an_epoch_that_repeats_the_first_one_is_found(tmp_path: Path) -> None:
    events = [batch("ab"), step(1), batch("ab", 1), step(2, epoch=1), order("ab", "cd"), order("ab", "cd", epoch=1)]
    own = [batch("ab"), step(1), batch("da", 1), step(2, epoch=1), order("ab", "cd"), order("da", "bc", epoch=1)]
    reference = recorded(tmp_path, [*own, order("", epoch=8)], 0, 1, [0, 7])
    assert [each.code for each in find_faults(Readers.from_ranks((recorded(tmp_path, events),)), reference)] == ["E023"]


@pytest.mark.parametrize(("applied", "weights", "codes"), [
    (0.0, 1.0, ["E028"]),
    (1.0, 1.0, []),  # the gradients are the cause
    (0.0, 0.0, []),  # ZeroRedundancyOptimizer has the behavior of its inner optimizer
])  # fmt: skip
def test_another_optimizer_is_a_cause_where_it_alone_differs(applied: float, weights: float, codes: list[str], tmp_path: Path) -> None:
    mine, other = (recorded(tmp_path, [batch("a"), step(1) | {"kind": kind}]).steps[0] for kind in ("Adam", "SGD"))
    points = {"applied": [Probe("", "", applied, 0.5, "a")], "weights": [Probe("", "", weights, 0.5, "a")]}
    sides = SimpleNamespace(differences=[StepDifference(mine, other, points)])
    assert [each.code for each in check_settings(sides)] == codes


def test_tensors_are_stored_once_and_read_again(tmp_path: Path) -> None:
    kinds = [torch.randn(3, 2), torch.randn(4).bfloat16(), torch.tensor(5), torch.empty(0, 3), torch.tensor([True, False])]
    folder = values.TensorFolder(str(tmp_path), 1 << 20)
    stored = [folder.store(t) for t in (*kinds, kinds[0].clone())]
    assert all(torch.equal(folder.load(each), t) for each, t in zip(stored, kinds))
    assert stored[0] == stored[-1]
    assert folder.room == (1 << 20) - sum(t.nbytes for t in kinds)
    left_out = folder.store(torch.ones(1 << 20))
    assert folder.room < 0 and not (tmp_path / left_out.name).exists()


@pytest.mark.parametrize("call", [lambda model, x: model(x), lambda model, x: model(input=x)])
def test_rows_that_a_model_gets_are_those_that_the_script_gives(
    call: Callable[[nn.Module, torch.Tensor], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By position or by keyword, in the first call too, and before hooks that change them: FSDP2 rounds positional ones to its format."""
    known = recorder.ScriptRecorder({"out": str(tmp_path), "tensors": str(tmp_path), "room": 1 << 20, "replay": {}})
    known.first_hook.append(nn.modules.module.register_module_forward_pre_hook(known.record_start))
    model, rows = nn.Linear(2, 1), torch.randn(2, 3, 2)
    monkeypatch.setattr(recorder.gc, "get_objects", lambda: [model])  # models of other tests may still exist
    model.register_forward_pre_hook(lambda _, given: tuple(t.bfloat16().float() for t in given))
    with known.file:
        for x in rows:
            call(model, x)
    events = [json.loads(line) for line in next(tmp_path.glob("*.jsonl")).read_text().splitlines()]
    assert [each["rows"] for each in events if each["is"] == "batch"] == [values.hash_rows(x) for x in rows]


def test_a_step_that_calls_its_closure_many_times_is_one_step(tmp_path: Path) -> None:
    known = recorder.ScriptRecorder({"out": str(tmp_path), "tensors": str(tmp_path), "room": 1 << 20, "replay": {}, "watch": True})
    model, rows = nn.Linear(2, 1), torch.randn(3, 2)
    with torch.device("meta"):
        meta = nn.BatchNorm1d(2)
    with FakeTensorMode():
        fake = nn.BatchNorm1d(2)
        model.register_buffer("counted", torch.zeros(4))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    optimizer.register_step_pre_hook(known.before_step)
    optimizer.register_step_post_hook(known.after_step)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(rows) - 1).square().mean()
        loss.backward()
        return loss

    with known.file:
        for _ in range(2):
            optimizer.step(closure)
    events = [json.loads(line) for line in next(tmp_path.glob("*.jsonl")).read_text().splitlines()]
    assert [each["step"] for each in events] == [1, 2]
    assert {*events[0]["applied"]} == {*events[0]["weights"]} and len(events[0]["applied"]) == 2
    assert not any("counted" in name for name in events[0]["buffers"]), "a fake buffer of a model that trains"
    assert not {id(meta), id(fake)} & {*map(id, known.find_modules())}, "models without values, as for counting operations"


@pytest.mark.parametrize(("name", "expected"), [
    ("0.weight", "0.weight"),
    ("module.module.0.weight", "0.weight"),  # DistributedDataParallel, twice
    ("_orig_mod.layers.1._checkpoint_wrapped_module.weight", "layers.1.weight"),
    ("_forward_module.module.head.module.bias", "head.module.bias"),  # a child process of the user
])  # fmt: skip
def test_names_do_not_know_wrappers(name: str, expected: str) -> None:
    assert recorder.strip_wrappers(name) == expected


def test_seams_of_torch_do_what_the_recorder_takes_them_for(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.utils.data.dataloader
    own = DataLoader(TensorDataset(torch.arange(6.0)), batch_size=2)
    assert [*DataLoader._index_sampler.fget(own)] == [[0, 1], [2, 3], [4, 5]]
    assert own._dataset_kind != data._DatasetKind.Iterable
    with monkeypatch.context() as patch:
        patch.setattr(DataLoader, "_index_sampler", property(lambda self: [[5], [0, 1]]))
        assert [batch.tolist() for (batch,) in own] == [[5.0], [0.0, 1.0]]
    assert isinstance(iter(own), data._BaseDataLoaderIter)
    called = []
    backward = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda *given, **more: (called.append(given[0]), backward(*given, **more))[1])
    (torch.ones(2, requires_grad=True) * 3).sum().backward()
    assert len(called) == 1


@pytest.mark.parametrize("name", [
    *(f"utils.data.dataloader.{each}" for each in ("_BaseDataLoaderIter", "_DatasetKind", "DataLoader._index_sampler")),
    "nn.utils.clip_grads_with_norm_",  # a name that `nn.utils.clip_grad` lacks
])  # fmt: skip
def test_a_torch_without_a_seam_is_left_as_it_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"torch.{name}")
    backward = torch.autograd.backward
    recorder.install({"out": str(tmp_path), "tensors": str(tmp_path), "room": 0, "replay": {}})
    assert name.rpartition(".")[2] in (tmp_path / "unsupported").read_text() and torch.autograd.backward is backward


def test_dropouts_of_torch_are_known() -> None:
    """A dropout that is new in torch would stay active, and correct scripts would be reported as different."""
    found = {name for name in itertools.chain(dir(nn.functional), dir(torch)) if "dropout" in name and not name.startswith("_")}
    known = {*recorder.DROPOUTS, "native_dropout", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_"}
    assert found <= known, found - known
