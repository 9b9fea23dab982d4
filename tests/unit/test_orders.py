"""The order of an epoch, and the number of samples per step: pure functions, in range, with the properties of their names."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import WeightedRandomSampler

import plait
from plait import PlaitError, orders
from plait.config.job import Job, TokenBudget
from plait.data.batch import BatchShare, Position
from plait.data.loading import iter_batches
from plait.data.sampling import Sampling, check_sampling, epoch_order, open_sketch_data

LENGTHS = [3, 14, 5, 5, 9, 1, 7, 2, 12, 4, 6, 8] * 8
ALL = {
    "sequential": orders.sequential,
    "weighted": orders.weighted(LENGTHS),
    "mixed": orders.mixed((90, 6), (2, 1)),
    "length_grouped": orders.length_grouped(LENGTHS, 4),
    "curriculum": orders.curriculum(LENGTHS, 4),
    "drop_last": orders.drop_last(7),
}


def job(**settings: object) -> Job:
    return plait.Job(
        model=lambda: torch.nn.Linear(1, 1), loss=lambda o, t: o.sum(), data=lambda: range(96), batch=8, steps=1,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **settings,
    )  # fmt: skip


def code(what) -> tuple[str, str]:
    with pytest.raises(PlaitError) as error:
        what()
    return error.value.codes[0], str(error.value)


@pytest.mark.parametrize("name", ALL)
def test_an_order_is_pure_and_another_in_each_epoch(name: str) -> None:
    rows = [epoch_order(ALL[name], 5, epoch, 96) for epoch in (0, 0, 1)]
    assert np.array_equal(rows[0], rows[1]) and rows[0].min() >= 0 and rows[0].max() < 96
    assert np.array_equal(rows[0], rows[2]) == (name == "sequential")
    assert not np.array_equal(rows[0], epoch_order(ALL[name], 6, 0, 96)) or name == "sequential"


def test_weighted_draws_as_often_as_weights_say() -> None:
    """The same frequencies as torch's sampler, within random variation."""
    drawn = Counter(orders.weighted([0.0, 1.0, 3.0, 0.0], samples=40_000)(0, 0, 4).tolist())
    torch.manual_seed(0)
    theirs = Counter(WeightedRandomSampler([0.0, 1.0, 3.0, 0.0], 40_000))
    assert set(drawn) == set(theirs) == {1, 2}
    assert drawn[2] / drawn[1] == pytest.approx(3, rel=0.05) == theirs[2] / theirs[1]


def test_mixed_has_the_shares_and_every_sample_of_a_set_as_often_as_any_other() -> None:
    order = orders.mixed((9, 4), (1, 1), samples=12)
    epochs = [order(1, epoch, 13) for epoch in range(6)]
    assert all((ids < 9).sum() == 6 for ids in epochs)
    counts = Counter(np.concatenate(epochs).tolist())
    assert {counts[i] for i in range(9)} == {4} and {counts[i] for i in range(9, 13)} == {9}


def test_length_grouped_pads_little_and_begins_with_the_longest() -> None:
    """A permutation, sorted in chunks: a step has far less padding than in an arbitrary order."""
    lengths = np.array(LENGTHS)

    def padding(ids: np.ndarray) -> int:
        return sum(int(lengths[step].max()) * 4 - int(lengths[step].sum()) for step in ids.reshape(-1, 4))

    grouped, shuffled = ALL["length_grouped"](0, 0, 96), epoch_order(None, 0, 0, 96)
    assert sorted(grouped) == list(range(96)) and lengths[grouped[0]] == 14
    assert padding(grouped) < padding(shuffled) / 2


def test_a_curriculum_begins_with_the_easiest() -> None:
    order = orders.curriculum([5.0, 1.0, 4.0, 2.0, 3.0], epochs=2, start=0.4)
    assert [set(order(0, epoch, 5).tolist()) for epoch in range(3)] == [{1, 3}, {1, 3, 4, 2}, set(range(5))]


def test_drop_last_leaves_out_the_short_batch() -> None:
    assert len(ALL["drop_last"](0, 0, 96)) == 91 and len(orders.drop_last(200)(0, 0, 96)) == 96


@pytest.mark.parametrize(
    "returned, told",
    [
        ([0.5, 1.0], "not a row of whole numbers"),
        ([[0, 1]], "with shape [1, 2]"),
        ([], "not a row of whole numbers"),
        (np.array([], dtype=int), "no index"),
        ([0, 96], "from 0 to 96, and the data has 96 samples"),
        (torch.tensor([-1]), "from -1 to -1"),
        ("all", "not a row"),
    ],
)
def test_what_is_no_order_is_refused(returned: object, told: str) -> None:
    found, text = code(lambda: epoch_order(lambda *_: returned, 0, 0, 96))
    assert found == "J027" and told in text


def test_an_order_that_is_not_a_function_of_its_arguments_is_refused() -> None:
    found, text = code(lambda: check_sampling(job(order=lambda s, e, n: np.random.default_rng().permutation(n)), range(96)))
    assert found == "J027" and "in two calls" in text
    check_sampling(job(order=lambda s, e, n: torch.randperm(n)), range(96))  # torch's own generator is seeded


def test_the_generators_are_afterwards_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    epoch_order(lambda s, e, n: torch.randperm(n), 0, 0, 96)
    assert torch.equal(torch.rand(2), expected)


def test_an_iterable_has_neither() -> None:
    stream = (i for i in range(3))
    assert code(lambda: check_sampling(job(order=orders.sequential), stream))[0] == "J027"
    assert code(lambda: check_sampling(job(token_budget=TokenBudget(4, lambda: LENGTHS)), stream))[0] == "J028"


@pytest.mark.parametrize("lengths", [lambda: [1.5] * 96, lambda: [1] * 95, lambda: [-1] * 96, lambda: 1 / 0])
def test_wrong_lengths_are_refused(lengths) -> None:
    assert code(lambda: check_sampling(job(token_budget=TokenBudget(8, lengths)), range(96)))[0] == "J028"


@pytest.mark.parametrize("padded", [True, False])
def test_a_step_takes_samples_as_long_as_they_fit(padded: bool) -> None:
    budget, lengths = TokenBudget(20, lambda: LENGTHS, padded), np.array(LENGTHS)
    sampling, start, sizes = Sampling(96, 4, 0, orders.weighted([1] * 96), budget), 0, list[int]()
    ids = sampling.epoch_indices(0)
    while size := sampling.step_size(0, start):
        cost = lambda n, at=start: lengths[ids[at : at + n]].max() * n if padded else lengths[ids[at : at + n]].sum()  # noqa: E731
        assert size == 1 or cost(size) <= 20
        assert size == 4 or start + size == 96 or cost(size + 1) > 20
        start, sizes = start + size, [*sizes, size]
    assert start == 96 and len(set(sizes)) > 2


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_loader_processes_take_the_steps_of_one_device(workers: int) -> None:
    data = [(torch.tensor(i), torch.tensor(i)) for i in range(96)]
    sampling = Sampling(96, 6, 3, ALL["length_grouped"], TokenBudget(30, lambda: LENGTHS))

    def ids(share: BatchShare, at: Position) -> list[list[int]]:
        source = iter_batches(data, 6, 3, share, at, workers=workers, sampling=sampling)
        return [[i for m in batch.micro_batches for i in m.ids] for batch in islice(source, 30)]

    whole, parts = ids(BatchShare(), Position()), [ids(BatchShare(rank, 4), Position()) for rank in range(4)]
    assert [[i for part in step for i in part] for step in zip(*parts)] == whole
    assert any(not part for step in zip(*parts) for part in step) and len(whole[0]) < 6
    at = next(islice(iter_batches(data, 6, 3, BatchShare(), Position(), sampling=sampling), 9, None)).next_position
    assert ids(BatchShare(), at)[:20] == whole[10:]


def test_a_sketch_sees_a_sample_of_which_a_batch_takes_the_budget() -> None:
    of = lambda tokens: open_sketch_data(job(token_budget=TokenBudget(tokens, lambda: LENGTHS)), range(96))[0]  # noqa: E731
    assert LENGTHS[of(8 * 6)] == 6 and LENGTHS[of(8 * 10)] == 12 and LENGTHS[of(8 * 100)] == 14
