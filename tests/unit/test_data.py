"""Data sets of every kind, loaded in this process and by real loader workers: the same samples, the same values."""

import multiprocessing
import random
import subprocess
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from plait.config.errors import PlaitError, Problem
from plait.data.batch import (
    Batch,
    BatchShare,
    MicroBatch,
    Position,
    collate,
    make_sketch_batch,
    open_data,
    open_first_sample,
    validate_data,
    weigh_micro_batch,
)
from plait.data.loading import iter_batches

from .datasets import Augmented, Padded, Plain, Sized, Stateful, Stream, Torch, Trees

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more than the cores of a small machine


@pytest.fixture(autouse=True)
def no_worker_stays():
    yield
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()


def take(
    data: Any, steps: int, share: BatchShare | None = None, at: Position | None = None, batch: int = 4, **more: Any
) -> list[Batch]:
    source = iter_batches(data, batch, 7, share or BatchShare(), at or Position(), **more)
    rows = list(islice(source, steps))
    source.close()  # type: ignore[attr-defined]
    return rows


def samples(rows: list[Batch]) -> dict[tuple[int, int], tuple[float, ...]]:
    """(epoch, id) -> the values of the sample."""
    return {
        (b.position.epoch, i): tuple(x.tolist())
        for b in rows
        for m in b.micro_batches
        for i, x in zip(m.ids, m.inputs[: m.count], strict=True)
    }


def same(a: list[Batch], b: list[Batch]) -> bool:
    def bare(rows: list[Batch]) -> list[Any]:
        return [
            (
                r.position,
                r.next_position,
                r.size,
                [(m.first, m.ids, m.inputs.tolist(), m.targets.tolist()) for m in r.micro_batches],
            )
            for r in rows
        ]

    return bare(a) == bare(b)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_load_what_this_process_loads(workers: int) -> None:
    rows = take(Plain(10), 7, BatchShare(1, 3, 2), workers=workers)
    alone = take(Plain(10), 7, BatchShare(1, 3, 2))
    makers = {x[1] for x in samples(rows).values()}
    assert makers == ({-1.0} if workers == 0 else set(map(float, range(workers))))
    assert [(b.position, b.next_position, [m.ids for m in b.micro_batches]) for b in rows] == [
        (b.position, b.next_position, [m.ids for m in b.micro_batches]) for b in alone
    ]
    assert all(m.targets.tolist() == list(m.ids) for b in rows for m in b.micro_batches if m.count)


@pytest.mark.parametrize("kind", ["torch", "numpy", "python", "all"])
def test_augmentation_knows_neither_rank_nor_layout_nor_workers(kind: str) -> None:
    expected = samples(take(Augmented(10, kind), 6))
    assert len(expected) == 20
    assert len(set(expected.values())) == 20
    for ranks, micro, workers in ((2, 1, 0), (3, 2, 0), (5, 1, 0), (1, 3, 1), (1, 2, 2)):
        together: dict[tuple[int, int], tuple[float, ...]] = {}
        for rank in range(ranks):
            together |= samples(take(Augmented(10, kind), 6, BatchShare(rank, ranks, micro), workers=workers))
        assert together == expected


def test_a_worker_leaves_signals_to_its_rank_and_ends_with_what_reads_from_it() -> None:
    source = iter_batches(Plain(), 4, 7, BatchShare(), Position(), workers=1)
    next(source)
    (worker,) = multiprocessing.active_children()
    worker.terminate()
    worker.join(0.2)
    assert worker.is_alive(), "who ends all processes of a run asks the ranks to save"
    source.close()
    assert not worker.is_alive()


class Stuck(Plain):
    """Reads four samples, and then one forever. It creates `began` when that starts. At that time no lock of the loader is taken."""

    def __init__(self, began: Path):
        super().__init__()
        self.began, self.reads = began, 0

    def __getitem__(self, i: int):
        self.reads += 1
        if self.reads > 4:
            self.began.touch()
            time.sleep(600)
        return super().__getitem__(i)


def test_a_worker_that_reads_for_long_is_not_waited_for(tmp_path: Path) -> None:
    source = iter_batches(Stuck(tmp_path / "began"), 4, 7, BatchShare(), Position(), workers=1)
    next(source)
    (worker,) = multiprocessing.active_children()
    while not (tmp_path / "began").exists():
        time.sleep(0.01)
    began = time.monotonic()
    source.close()
    assert not worker.is_alive() and time.monotonic() - began < 4


@pytest.mark.slow
def test_a_program_ends_though_a_worker_still_reads(tmp_path: Path) -> None:
    """At exit Python sends SIGTERM to daemon processes, and joins them."""
    text = """
import time
from plait.data.batch import BatchShare, Position
from plait.data.loading import iter_batches

class Slow:
    reads = 0
    def __len__(self): return 40
    def __getitem__(self, i):
        self.reads += 1
        if self.reads > 1: time.sleep(600)
        return i, i

source = iter_batches(Slow(), 1, 7, BatchShare(), Position(), workers=2)
next(source)
print("ends", flush=True)
"""
    (tmp_path / "reads.py").write_text(text)
    ran = subprocess.run([sys.executable, "reads.py"], cwd=tmp_path, timeout=100, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout == "ends\n", ran.stderr


def test_augmentation_survives_a_resume() -> None:
    rows = take(Augmented(10, "all"), 8)
    assert same(take(Augmented(10, "all"), 4, at=rows[3].next_position), rows[4:])


def test_augmentation_by_a_cached_normal_number() -> None:
    class OneNormal(Plain):
        def __getitem__(self, i: int) -> Any:
            return torch.tensor([np.random.randn()]), torch.tensor(i)

    np.random.seed(0)
    expected = samples(take(OneNormal(8), 1, batch=2))
    found = {}
    for rank in range(2):
        np.random.seed(0)
        np.random.randn()  # as a model's initialization may: the next number is cached
        found |= samples(take(OneNormal(8), 1, BatchShare(rank, 2), batch=2))
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Stream, Stateful])
@pytest.mark.parametrize("length", [10, 8, 3])
@pytest.mark.parametrize("workers", [0, 1])
def test_iterables_over_layouts_and_resumes(kind: type, length: int, workers: int) -> None:
    """8 ends exactly at the end of a batch, 3 is shorter than a batch."""
    alone = take(kind(length, noisy=True), 6)
    assert {i for b in alone if b.position.epoch == 0 for m in b.micro_batches for i in m.ids} == set(range(length))
    expected = samples(alone)
    together: dict[tuple[int, int], tuple[float, ...]] = {}
    for rank in range(2):
        together |= samples(take(kind(length, noisy=True), 6, BatchShare(rank, 2, 2), workers=workers))
    assert together == expected
    for done in (1, 2, 4) if workers == 0 else (1,):
        last = alone[done - 1]
        again = take(kind(length, noisy=True), 6 - done, at=last.next_position, workers=workers)
        assert samples(again) == samples(alone[done:])
        assert [b.next_position for b in again] == [b.next_position for b in alone[done:]]


def test_an_iterable_is_told_its_epoch() -> None:
    data = Stream(5)
    take(data, 5)
    assert data.epochs == [0, 1, 2]


def test_the_short_last_batch_and_empty_shares() -> None:
    rows = [take(Plain(5), 4, BatchShare(rank, 4)) for rank in range(4)]
    assert [b.size for b in rows[0]] == [4, 1, 4, 1]
    assert [r[1].count for r in rows] == [1, 0, 0, 0]
    has, lacks = rows[0][1].micro_batches[0], rows[3][1].micro_batches[0]
    assert (lacks.count, lacks.ids) == (0, ()) and torch.equal(lacks.inputs, has.inputs), "the sample of another rank"
    has, lacks = (take(Stream(5), 2, BatchShare(rank, 4))[1].micro_batches[0] for rank in (0, 3))
    assert (lacks.count, lacks.ids) == (0, ()) and torch.equal(lacks.inputs, has.inputs)


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_trees_of_inputs(kind: str) -> None:
    for rank, count in enumerate([1, 0]):
        micro = take(Trees(kind), 2, BatchShare(rank, 2))[1].micro_batches[0]
        x, mask = micro.inputs.values() if kind == "dict" else micro.inputs
        assert (micro.count, x.shape, mask.shape, mask.dtype) == (count, (1, 3), (1, 3), torch.bool)
        assert [len(t) for t in micro.targets] == [1, 1]


def test_a_data_set_collates_itself() -> None:
    for workers in (0, 1):
        for batch in take(Padded(5), 2, BatchShare(0, 2), workers=workers):
            (micro,) = batch.micro_batches
            assert (micro.targets - 1).tolist() == list(micro.ids)
            assert micro.inputs["tokens"].shape == (micro.count, max(micro.targets))


def test_an_empty_share_of_a_collate_with_a_number() -> None:
    class Numbered(Padded):
        def collate(self, samples: list[Tensor]) -> Any:
            inputs, targets = super().collate(samples)
            return inputs | {"longest": targets.max()}, targets

    take(Numbered(5), 2, BatchShare(1, 2))


def code(call: Any) -> str:
    with pytest.raises(PlaitError) as caught:
        call()
    return "".join(caught.value.codes)


def test_data_that_cannot_be_read() -> None:
    for data in ([], Plain(0), 3, object(), None):
        assert code(partial(validate_data, data, "here")) == "J007"
    for data in ([(1, 2)], Plain(1), Stream(0)):
        assert validate_data(data, "here") is data
    assert code(partial(take, Stream(0), 1)) == "J007"
    for bad in ([1, 2, 3, 4], [(1, 2, 3)] * 4, [{"a": 1, "b": 2}] * 4):
        assert code(partial(take, bad, 1)) == "J007"


def problem(call: Any) -> Problem:
    with pytest.raises(PlaitError) as caught:
        call()
    return caught.value.problems[0]


def test_a_loader_that_makes_batches() -> None:
    """Its samples and its `collate_fn` are used."""
    assert samples(take(validate_data(DataLoader(Plain(8), batch_size=4), "here"), 2)) == samples(take(Plain(8), 2))
    own = validate_data(DataLoader(Plain(8), batch_size=4, collate_fn=lambda rows: (torch.ones(len(rows)), rows)), "here")
    assert next(iter_batches(own, 4, 7, BatchShare(), Position())).micro_batches[0].inputs.tolist() == [1.0] * 4
    single = DataLoader(Plain(8), batch_size=None)
    assert len(samples(take(validate_data(single, "here"), 2))) == 8


def test_samples_that_are_dicts() -> None:
    """As in Hugging Face's data sets: the targets are the item named `labels` or similar, and lists become tensors."""
    listed = [{"input_ids": [1, 2], "more": {"mask": [[True], [False]]}, "text": ["a"], "labels": i} for i in range(4)]
    inputs, targets = collate(listed, listed)
    assert inputs["input_ids"].tolist() == [[1, 2]] * 4 and inputs["more"]["mask"].shape == (4, 2, 1)
    assert set(inputs) == {"input_ids", "more", "text"} and targets.tolist() == [0, 1, 2, 3]
    wrong = problem(partial(take, [{"input_ids": [1, 2], "class": 1}] * 4, 1))
    assert wrong.why == "it is a dict of input_ids, class" and "labels, label" in wrong.fix[1]


def test_a_collate_that_returns_a_dict() -> None:
    class Collating(Plain):
        def collate(self, samples: list[Any]) -> Any:
            return {"x": samples, "labels": samples} if len(samples) == 2 else {"x": samples, "y_true": samples}

    assert collate(Collating(8), [1, 2]) == ({"x": [1, 2]}, [1, 2])
    wrong = problem(partial(take, Collating(8), 1))
    assert "`collate`" in wrong.what and wrong.why == "it returned a dict of x, y_true"


def test_samples_of_other_lengths() -> None:
    ragged = [(torch.zeros(n), torch.tensor(0)) for n in (1, 2, 3, 4)]
    wrong = problem(partial(take, ragged, 1))
    assert wrong.code == "J007" and "tensor [" in wrong.why and "pads" in wrong.fix[1]
    assert problem(partial(take, [(None, torch.zeros(1))] * 4, 1)).code == "J007"


def test_a_generator_is_made_again_for_every_epoch() -> None:
    def numbers():
        yield from ((torch.tensor([float(i)]), torch.tensor(i)) for i in range(5))

    data = open_data(numbers)
    rows = take(data, 5)
    assert [b.size for b in rows] == [4, 1, 4, 1, 4]
    assert open_first_sample(numbers, data)[0][1] == 0
    once = numbers()
    assert problem(partial(open_data, lambda: once)).code == "J007"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_that_shuffles_as_it_is_opened(workers: int) -> None:
    class Shuffled:
        def __iter__(self):
            order = torch.randperm(10).tolist()
            return ((torch.tensor([float(i)]), torch.tensor(i)) for i in order)

    expected = samples(take(Shuffled(), 6))
    torch.rand(3)  # the generators have another state on another rank
    found = samples(take(Shuffled(), 6, workers=workers))
    assert found == expected
    first, second = ([x for (epoch, _), x in sorted(expected.items()) if epoch == e] for e in (0, 1))
    assert sorted(first) == sorted(second) and first != second


def test_a_worker_says_what_is_wrong() -> None:
    assert code(partial(take, Stream(0), 1, workers=1)) == "J007"


def test_a_resumed_stream_that_became_shorter() -> None:
    assert code(partial(take, Stream(5), 1, at=Position(3, 0, 8, 8)))


def test_a_resumed_data_set_that_became_shorter() -> None:
    assert code(partial(take, Plain(5), 1, at=Position(3, 0, 8, 8)))


@pytest.mark.parametrize("data", [pytest.param(Torch, id="IterableDataset"), pytest.param(Sized, id="with_len")])
def test_torchs_iterable(data: type) -> None:
    assert make_sketch_batch(data(), 2)[0].tolist() == [[0.0], [0.0]]
    assert take(data(), 1)[0].micro_batches[0].ids == (0, 1, 2, 3)


def test_the_first_sample_leaves_the_generators() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    inputs, targets = make_sketch_batch(Augmented(3, "all"), 4)
    assert inputs.shape == (4, 3)
    assert targets.tolist() == [0, 0, 0, 0]
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_weights() -> None:
    micro = MicroBatch(0, 2, None, torch.tensor([1.0, 3.0]), (0, 1))
    assert weigh_micro_batch(None, micro) == 2.0
    assert weigh_micro_batch(lambda t: t, micro) == 4.0
    assert weigh_micro_batch(lambda t: 2.5, micro) == 2.5
    assert weigh_micro_batch(lambda t: t.new_tensor(9), MicroBatch(0, 0, None, torch.zeros(0), ())) == 0.0
    assert collate([], [(torch.zeros(1), 1)] * 2)[0].shape == (2, 1)
