"""Local batches by speed: the re-fit on artificial times, errors, the state in checkpoints."""

import json
import random
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from msgspec import convert, structs

from plait.checkpoint.manifest import SavedShares
from plait.config.plan import Plan
from plait.engine.step import get_room_by_share, get_slowest_by_share
from plait.launch import fork
from plait.launch.place import Place
from plait.parallel.batch_split import strategy
from plait.parallel.batch_split.batch_balancer import BatchBalancer, estimate_costs, format_parts
from plait.tensors.transfers import exposed_seconds, record_waits

Takes = Callable[[int, int, int], float]
"""(step, rank's part, samples) -> seconds."""


def play(
    takes: Takes, steps: int = 120, batch: int = 64, ranks: int = 4, balance: BatchBalancer | None = None
) -> list[tuple[int, ...]]:
    """The samples of every step for these times of the local batches."""
    balance = balance or BatchBalancer(batch, ranks)
    history, spent = list[tuple[int, ...]](), [0.0] * ranks
    for step in range(steps):
        held = balance.split_batch(balance.course.weights_at(step))
        history.append(held)
        balance.update_parts(step + 1, held, spent, [0] * ranks, 2)
        spent = [takes(step, i, n) for i, n in enumerate(held)]
    return history


def changes(history: list[tuple[int, ...]]) -> int:
    return sum(a != b for a, b in pairwise(history))


def test_shares_come_to_the_speeds() -> None:
    history = play(lambda step, share, n: n * (0.03 if share == 2 else 0.01))
    assert history[0] == (16, 16, 16, 16) and changes(history) == 1
    assert history[-1] == (20, 19, 6, 19)  # 0.2 s each, at most
    assert history.index(history[-1]) == 12


def test_a_fixed_cost_is_told_apart() -> None:
    """After one change there are two sizes: a step's fixed costs, which do not shrink with its samples, can be separated."""
    history = play(lambda step, share, n: (0.2 + 0.01 * n) * (1 + 2 * (share == 3)), batch=128)
    last = history[-1]
    takes = [(0.2 + 0.01 * n) * (1 + 2 * (share == 3)) for share, n in enumerate(last)]
    assert (
        max(takes) <= 1.05 * 0.66 and changes(history) <= 4
    )  # 43, 43, 42, 0 would take 0.63 s, and the empty local batch 0.6


@pytest.mark.parametrize("noise", (0.02, 0.1, 0.3, 1.0))
@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_nothing(noise: float, seed: int) -> None:
    """Equal devices with varying times, occasionally by a factor of ten."""
    dice = random.Random(seed)
    takes = lambda step, share, n: 0.01 * n * (dice.lognormvariate(0, noise) + 10 * (dice.random() < 0.03))  # noqa: E731
    assert changes(play(takes, 400)) == 0


def test_noise_does_not_hide_a_slow_device() -> None:
    dice = random.Random(1)
    history = play(lambda step, share, n: 0.01 * n * (3 if share == 1 else 1) * dice.lognormvariate(0, 0.1), 400)
    assert all(abs(n - m) <= 2 for n, m in zip(history[-1], (19, 7, 19, 19))) and changes(history) <= 2


def test_a_change_of_speed_is_followed() -> None:
    history = play(lambda step, share, n: 0.01 * n * (3 if share == (0 if step < 60 else 3) else 1), 140)
    assert history[59] == (6, 20, 19, 19) and history[-1] == (20, 19, 19, 6)
    assert history.index(history[-1]) <= 60 + 20 and changes(history) <= 3


def test_small_gains_are_left() -> None:
    assert changes(play(lambda step, share, n: n * (0.0104 if share else 0.01))) == 0


def test_batches_of_few_samples_stay_where_no_whole_sample_helps() -> None:
    assert changes(play(lambda step, share, n: n * (0.015 if share else 0.01), batch=4, ranks=2)) == 0


def test_a_state_goes_on_where_it_was() -> None:
    takes = lambda step, share, n: n * (0.03 if share == 2 else 0.01)  # noqa: E731
    balance = BatchBalancer(64, 4)
    play(takes, 40, balance=balance)
    again = BatchBalancer(64, 4)
    again.load_state_dict(structs.asdict(convert(json.loads(json.dumps(balance.state_dict())), SavedShares)))
    assert again.course.to_rows() == balance.course.to_rows() and list(again.rows) == list(balance.rows)
    for other in (BatchBalancer(32, 4), BatchBalancer(64, 3)):
        other.load_state_dict(balance.state_dict())
        assert other.split_batch(other.course.weights_at(50)) == other.split_batch((1,) * other.ranks) and not other.rows


@pytest.mark.parametrize(
    "state",
    [{"parts": [[0, 1, 1]]}, {"parts": [[0, 1, 1], [0, 1]]}, {"parts": [[0, 1, 0], [0, 1, 1]]}, {"parts": [[0, 1, -1], [0, 1, 1]]},
     {"parts": [[0, 1, 1.5], [0, 1, 1]]}, {"rows": [[[1, 2], [0.1]]]}, {"rows": [[[1, 2], [0.1, float("inf")]]]}, {"rows": [3]},
     {"batch": "8"}, {"parts": [[0], [0]]}],
)  # fmt: skip
def test_a_forged_state_is_no_state(state: dict[str, object]) -> None:
    good = {"batch": 8, "parts": [[0, 1, 1], [0, 3, 1]], "rows": [[[4, 4], [0.1, 0.3]]]}
    assert convert(good, SavedShares)
    with pytest.raises(ValueError):
        convert(good | state, SavedShares)


def test_costs_want_enough_steps() -> None:
    rows = [((8, 8), (0.1, 0.2))] * 7
    assert estimate_costs(rows, (8, 8)) is None and estimate_costs(rows * 2, (8, 8)) is not None and estimate_costs(rows * 2, (12, 4)) is None


def test_what_is_said() -> None:
    balance, notes = BatchBalancer(32, 2), list[str]()
    for step in range(20):
        held = balance.split_batch(balance.course.weights_at(step))
        notes.append(balance.update_parts(step + 1, held, [0.01 * held[0], 0.03 * held[1]], [0, 0], 2))
    said = [note for note in notes if note]
    assert format_parts((24, 8)) == "3:1" and len(said) == 1
    assert said[0].startswith(
        "note  local batches 3:1 from step 13 on: rank 1 computes a sample in 3.0 × the time of the fastest"
    )


@pytest.mark.parametrize(
    ("plan", "device", "codes"),
    [("dp=3 batch_split=3:1", "cpu", ["P015"]), ("batch_split=auto", "cpu", ["P015"]), ("dp=2 batch_split=3:1", "cuda", []),
     ("dp=2 processes=one batch_split=3:1", "cpu", ["P015"]), ("dp=2 fsdp=2 batch_split=4:3:2:1", "cpu", []),
     ("fsdp=2 batch_split=auto", "cuda", ["P016"]), ("dp=2 tp=2 batch_split=auto", "cuda", [])],
)  # fmt: skip
def test_what_is_refused(plan: str, device: str, codes: list[str]) -> None:
    parsed = Plan.parse(plan)
    assert strategy.is_enabled(parsed) and [p.code for p in strategy.validate(parsed, 32, device)] == codes


def test_the_slowest_of_a_share_counts() -> None:
    plan = Plan.parse("dp=2 tp=2 batch_split=auto")
    assert get_slowest_by_share(plan, [0.1, 0.4, 0.2, 0.1]) == [0.4, 0.2]
    assert get_room_by_share(plan, [8.0, 6.0, 0.0, 9.0]) == [6, 9]


def test_waits_inside_passes_do_not_count() -> None:
    assert exposed_seconds([(0.0, 1.0), (2.0, 3.0)], [(0.5, 1.5), (2.25, 2.5)]) == pytest.approx(1.25)

    def rank(place: Place) -> dict[str, float]:
        group, found = place.connect(torch.device("cpu")), list[tuple[float, float]]()
        time.sleep(0.2 * place.rank)
        with record_waits(found):
            dist.all_reduce(torch.ones(1), group=group)
        return {"waited": sum(b - a for a, b in found), "after": len(found)}

    first, second = fork.run_ranks(rank, 2)
    assert first["waited"] > 0.15 > second["waited"] and first["after"] == 1
