"""A hung rank is named and the run ends. A slow rank is only named, or left running."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from jobs import Numbers
from launched import Command, rows
from rarely import sampled

from plait.data.batch import BatchShare, Position
from plait.data.loading import iter_batches
from plait.launch import hangs
from plait.launch.activity import Activity, ActivityHistory, read_activity
from plait.launch.failures import describe_hang
from plait.launch.hangs import (
    AWAITED_BUSY_LIMIT,
    AWAITED_LIMIT,
    GROWTH_FACTOR,
    IDLE_LIMIT,
    READ_BUSY_LIMIT,
    READ_LIMIT,
    HangDetector,
    RankObservation,
    Stack,
    StackFrame,
    Stacks,
    compute_limit,
    format_silent_ranks,
    parse_stack,
)
from plait.launch.progress import Progress, ProgressBoard

JOB = str(Path(__file__).parents[1] / "jobs_hanging.py")
SEND = StackFrame("/somewhere/site-packages/torch/distributed/distributed_c10d.py", "10", "all_reduce")
MINE = StackFrame("/home/me/job.py", "7", "forward")
EVENT = StackFrame("/somewhere/site-packages/torch/cuda/streams.py", "231", "synchronize")
READ = StackFrame(str(Path(hangs.__file__).parents[1] / "tensors/transfers.py"), "37", "read")


def look(
    rank: int, phase: str, silent: float, *, busy: bool = False, frames: tuple[StackFrame, ...] = (), step: int = 3, share: float = 1.0
) -> RankObservation:
    """`share`: the fraction of its computing time in which it has a processor."""
    return RankObservation(rank, Progress(step, phase, 0.0), silent, busy, Stack(frames), 0.0 if busy else silent, share * silent if busy else 0.0)


def waits(rank: int, silent: float = 30.0, phase: str = "reduce") -> RankObservation:
    return look(rank, phase, silent, frames=(SEND,))


@pytest.mark.parametrize("suspect, others, alike, allowed", [
    (look(1, "forward", 30, frames=(MINE,)), [waits(0)], True, AWAITED_LIMIT),
    (look(1, "forward", 30, busy=True, frames=(MINE,)), [waits(0)], True, AWAITED_BUSY_LIMIT),
    (look(1, "forward", 30, busy=True, frames=(MINE,), share=0.2), [waits(0)], True, hangs.BUSY_LIMIT),  # the machine is busy
    (look(1, "build", 30, frames=(MINE,), step=-1), [waits(0)], True, AWAITED_LIMIT),
    (look(1, "evaluate", 30, frames=(MINE,)), [waits(0, phase="evaluate")], True, AWAITED_LIMIT),
    (look(1, "build", 30, frames=(MINE,), step=-1), [waits(0)], False, AWAITED_LIMIT),  # pipelines build the same way on all ranks
    (look(1, "build", 30, busy=True, frames=(MINE,), step=-1), [waits(0)], True, hangs.FIRST_STEP_LIMIT),  # it may prepare data for all ranks
    (look(1, "forward", 30, frames=(MINE,)), [waits(0)], False, IDLE_LIMIT),  # another stage's forward gives no information about this one
    (look(1, "forward", 30, busy=True, frames=(MINE,)), [waits(0)], False, hangs.BUSY_LIMIT),
    (look(1, "forward", 30, frames=(MINE,)), [waits(0), look(2, "forward", 1, busy=True)], True, IDLE_LIMIT),
    (look(1, "forward", 30, frames=(MINE,)), [look(0, "forward", 30, frames=(SEND, MINE))], True, IDLE_LIMIT),  # a barrier in user code
    (look(1, "forward", 30, frames=(MINE,)), [look(0, "reduce", 30, frames=(EVENT, READ))], True, IDLE_LIMIT),  # the devices may be computing
    (look(1, "forward", 30, busy=True, frames=(MINE,)), [look(0, "reduce", 30, frames=(EVENT, READ))], True, hangs.BUSY_LIMIT),
    (look(0, "forward", 30, frames=(MINE,)), [], True, IDLE_LIMIT),
    (look(1, "data", 300, frames=(MINE,)), [waits(0)], True, READ_LIMIT),
    (look(1, "evaluation data", 300, busy=True, frames=(MINE,)), [waits(0)], True, READ_BUSY_LIMIT),
    (look(1, "checkpoint", 120, frames=(MINE,)), [waits(0)], True, READ_LIMIT),
    (look(1, "forward", 90, busy=True, frames=(StackFrame("/x/site-packages/torch/_inductor/codecache.py", "1", "load"),)),
     [waits(0)], True, READ_BUSY_LIMIT),
])  # fmt: skip
def test_how_long_a_rank_may_go_on(suspect: RankObservation, others: list[RankObservation], alike: bool, allowed: float) -> None:
    assert compute_limit(suspect, others, alike, 0.0, None)[0] == allowed
    assert compute_limit(suspect, others, alike, 100.0, None)[0] == max(allowed, GROWTH_FACTOR * 100.0)
    assert compute_limit(suspect, others, alike, 100.0, 5.0)[0] == 5.0


def test_the_time_that_others_took_counts() -> None:
    """Rank 0 computed for 20 s and has waited for 10 s, so rank 1 may take ten times as long."""
    slow = waits(0)
    slow.idle_seconds = 10.0
    allowed, passed = compute_limit(look(1, "forward", 30, busy=True, frames=(MINE,)), [slow], True, 0.0, None)
    assert (allowed, passed) == (GROWTH_FACTOR * 20.0, 10.0)


def test_whose_code_a_stack_is_in() -> None:
    queue = StackFrame(os.__file__.replace("os.py", "queue.py"), "1", "get")
    assert MINE.owner == "user" and queue.owner == "python" and SEND.owner == "torch.distributed"
    assert Stack((queue, SEND, MINE)).is_communicating and Stack((queue, SEND, MINE)).is_user_collective
    assert not Stack((queue, MINE, SEND)).is_communicating
    assert Stack((queue, MINE)).where == "/home/me/job.py:7 in forward"
    reducer = StackFrame(str(Path(hangs.__file__).parents[1] / "reducer.py"), "1", "finish")
    assert Stack((SEND, reducer, MINE)).is_communicating and not Stack((SEND, reducer, MINE)).is_user_collective
    assert Stack((READ, SEND, MINE)).is_user_collective, "plait waits for the user's collective"
    assert not Stack((READ, SEND, reducer, MINE)).is_user_collective and not Stack((READ, reducer, MINE)).is_user_collective


def test_a_stack_is_parsed() -> None:
    text = 'Stack (most recent call first):\n  File "/b c.py", line 22 in mine\n  File "/d.py", line 3 in <module>\n'
    assert parse_stack(text).frames == (StackFrame("/b c.py", "22", "mine"), StackFrame("/d.py", "3", "<module>"))
    assert parse_stack("").frames == ()


@pytest.fixture
def sleeping() -> Iterator[tuple[Stacks, list[int]]]:
    stacks, pids = Stacks(range(2)), list[int]()
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            stacks.install_handlers(rank)
            while True:
                time.sleep(1000)
    try:
        yield stacks, pids
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        stacks.close()


def answer(stacks: Stacks, rank: int, pid: int) -> tuple[StackFrame, ...]:
    for _ in range(200):
        if found := stacks.request_stacks({rank: pid})[rank].frames:
            return found
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} does not answer")


def test_a_process_that_sleeps_says_where(sleeping: tuple[Stacks, list[int]]) -> None:
    stacks, pids = sleeping
    found = answer(stacks, 0, pids[0])
    assert found[0].name == "sleeping" and found[0].file == __file__
    assert os.waitpid(pids[0], os.WNOHANG) == (0, 0)


def test_stacks_of_many_ranks_are_read_at_the_same_time() -> None:
    """Eight ranks that wait in compiled code took 4 s to ask one by one. The launcher then took itself for suspended, and ended no hang."""
    stacks, board, pids = Stacks(range(8)), ProgressBoard(range(8)), dict[int, int]()
    for rank in range(8):
        pids[rank] = os.fork()
        if pids[rank] == 0:
            stacks.install_handlers(rank)
            ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)  # the call restarts after a signal
            os._exit(1)
    try:
        for rank in range(8):
            answer(stacks, rank, pids[rank])
        for _ in range(10):  # on a loaded machine, a process may not run for a while
            began = time.monotonic()
            found = stacks.request_stacks(pids, 1.0)
            took = time.monotonic() - began
            if took < 4.0 and all(stack.frames for stack in found.values()):
                break
        assert took < 4.0 and all(stack.frames for stack in found.values())
        for rank in range(8):
            board.write(rank, 3, "reduce" if rank else "forward")
        detector = HangDetector(board, pids, stacks, 4.0, True)
        while detector.check() is None:
            assert time.monotonic() - began < 60.0
            time.sleep(0.05)
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        stacks.close()


def test_an_answer_that_comes_late_is_no_other_ranks(sleeping: tuple[Stacks, list[int]]) -> None:
    stacks, pids = sleeping
    for rank, pid in enumerate(pids):
        answer(stacks, rank, pid)
        os.kill(pid, signal.SIGSTOP)
    assert stacks.request_stacks({0: pids[0]}, 0.1)[0].frames == ()
    threading.Timer(0.3, os.kill, (pids[0], signal.SIGCONT)).start()
    assert stacks.request_stacks({1: pids[1]}, 1.0)[1].frames == ()


def test_a_process_without_the_handler_is_not_signalled() -> None:
    other = subprocess.Popen(["sleep", "100"])
    stacks = Stacks([0])
    try:
        assert stacks.request_stacks({0: other.pid})[0].frames == ()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        stacks.close()


@pytest.mark.parametrize("code, busy", sampled(2, (
    ("import time; print(flush=True); time.sleep(100)", False),
    ("print(flush=True)\nwhile True: pass", True),
    ("import time; print(flush=True)\nwhile True: open('{file}', 'wb').write(bytes(1 << 20)); time.sleep(0.05)", True),
    ("import subprocess, sys; print(flush=True); subprocess.run([sys.executable, '-c', 'while True: pass'])", True),
)), ids=("sleeps", "computes", "writes", "has a child that computes"))  # fmt: skip
def test_what_a_process_uses(code: str, busy: bool, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", code.format(file=tmp_path / "x")], stdout=subprocess.PIPE,
                               start_new_session=True)  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.read(1)
        seen = False
        for _ in range(10):  # on a loaded machine it may not run for a while
            time.sleep(0.3)
            before = read_activity(process.pid)
            time.sleep(0.7)
            seen = read_activity(process.pid).is_busy_since(before)
            if seen == busy:
                break
        assert seen == busy
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_process_that_waits_for_a_processor_does_not_sleep() -> None:
    """A low-priority process among many others got 1.5 % of a core, and was ended as idle."""
    before = Activity(0.0, 0.0, 0.0, 0.0, False)
    assert Activity(10.0, 0.15, 0.0, 0.0, False, cpu_wait_seconds=9.0).is_busy_since(before)
    assert not Activity(10.0, 0.15, 0.0, 0.0, False, cpu_wait_seconds=3.0).is_busy_since(before), "it looks now and then, on a busy machine"
    ready = Activity(0.0, 0.1, 0.0, 0.0, False, is_ready=True)
    assert Activity(10.0, 0.1, 0.0, 0.0, False, is_ready=True).is_busy_since(ready), "the kernel has counted nothing yet: it got no processor"
    assert not Activity(10.0, 0.15, 0.0, 0.0, False, is_ready=True).is_busy_since(ready), "it was seen while it looked, twice"
    assert not Activity(10.0, 0.1, 0.0, 0.0, False).is_busy_since(ready)
    assert read_activity(os.getpid()).is_ready


def test_progress_of_a_reader_is_its_ranks_while_it_reads() -> None:
    board = ProgressBoard(range(2))
    board.write(1, 4, "data")
    began = board.read(1).since
    time.sleep(0.01)
    board.mark_read(1)
    assert board.read(1).since > began and board.read(1).step == 4
    board.write(1, 4, "forward")
    began = board.read(1).since
    board.mark_read(1)  # a loader prefetches, so its reads do not show that the rank makes progress
    assert board.read(1).since == began
    board.write_phase(1, "reduce")
    assert (board.read(1).phase, board.read(1).step) == ("reduce", 4)


def test_a_suspended_launcher_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    board, stacks, clock = ProgressBoard(range(1)), Stacks([0]), [1000.0]
    monkeypatch.setattr("plait.launch.hangs.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("plait.launch.progress.time.monotonic", lambda: clock[0])
    board.write(0, 3, "forward")
    detector = HangDetector(board, {0: os.getpid()}, stacks, 5.0, True)
    assert detector.check() is None
    clock[0] += 10_000.0
    assert detector.check() is None and not list(detector.list_silent_groups())
    stacks.close()


def test_one_line_on_silent_ranks() -> None:
    group, waiting = [look(1, "forward", 8.2, busy=True, frames=(MINE,))], [waits(0), waits(2)]
    text = format_silent_ranks(group, waiting, {}, logs=True)
    assert text == (
        "note  rank 1 has made no progress for 8 s at step 4, forward, at work: /home/me/job.py:7 in forward;"
        " ranks 0,2 wait for it (stack in logs/rank1.log)"
    )
    assert format_silent_ranks(group, waiting, {1: "the dry run"}, logs=False) == (
        "note  the dry run has made no progress for 8 s at step 4, forward, at work: /home/me/job.py:7 in forward; ranks 0,2 wait for it"
    )


@pytest.mark.parametrize("share, named", ((1.0, (30, 34)), (0.25, (120, 126))))
def test_a_rank_that_computes_is_named_by_its_processor_time(share: float, named: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """`share`: the fraction of a core that a busy machine leaves to the rank."""
    clock, board = [1000.0], ProgressBoard(range(1))
    for module in ("hangs", "progress"):
        monkeypatch.setattr(f"plait.launch.{module}.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(hangs, "is_stopped", lambda pid: False)
    monkeypatch.setattr(hangs, "read_activity", lambda pid: Activity(clock[0], share * clock[0], 0.0, 0.0, False))
    board.write(0, 3, "forward")
    detector = HangDetector(board, {0: 0}, FakeStacks({0: (MINE,)}), None, True)
    while not (said := [*detector.list_silent_groups()]):
        clock[0] += 1.0
        assert clock[0] < 1200 and detector.check() is None
    assert named[0] <= clock[0] - 1000 <= named[1] and said[0][0][0].is_busy


class FakeStacks(Stacks):
    """Stacks of processes, by their ids."""

    def __init__(self, frames: dict[int, tuple[StackFrame, ...]]):
        self.frames = frames

    def request_stacks(self, pids: Mapping[int, int], patience: float = 0.5) -> dict[int, Stack]:
        return {rank: Stack(self.frames[pid]) for rank, pid in pids.items()}


def watched(frames: dict[int, tuple[StackFrame, ...]], monkeypatch: pytest.MonkeyPatch, *, step: int, spins: bool, seconds: int,
            elsewhere: bool = False) -> tuple[float, hangs.Hang | None, list[str]]:  # fmt: skip
    """Returns (seconds until the silent ranks were ended, the hang or None, the lines printed before).
    `spins`: ranks that wait for a device use the processor."""
    clock, board = [1000.0], ProgressBoard(range(len(frames)))
    monkeypatch.setattr("plait.launch.hangs.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("plait.launch.progress.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(hangs, "is_stopped", lambda pid: False)
    spent = lambda pid: clock[0] * (spins and frames[pid][0] == EVENT)  # noqa: E731
    monkeypatch.setattr(hangs, "read_activity", lambda pid: Activity(clock[0], spent(pid), 0.0, 0.0, False))
    for rank, row in frames.items():
        board.write(rank, step, "forward" if row[0] == MINE else "reduce")
    detector, said = HangDetector(board, {rank: rank for rank in frames}, FakeStacks(frames), None, True, elsewhere), list[str]()
    while clock[0] < 1000.0 + seconds:
        clock[0] += 1.0
        found = detector.check()
        said += [format_silent_ranks(*group, {}, logs=True) for group in detector.list_silent_groups()]
        if found is not None:
            return clock[0] - 1000.0, found, said
    return float(seconds), None, said


def watch_activity(used: Mapping[int, Callable[[float], float]], where: dict[int, tuple[StackFrame, ...]], phase: str, seconds: int,
                   monkeypatch: pytest.MonkeyPatch) -> tuple[float, hangs.Hang | None]:  # fmt: skip
    """Returns (seconds until a rank was ended, the hang or None). `used`: CPU seconds of each rank at a time after its last progress."""
    clock, board = [1000.0], ProgressBoard(range(len(where)))
    for module in ("hangs", "progress"):
        monkeypatch.setattr(f"plait.launch.{module}.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(hangs, "is_stopped", lambda pid: False)
    monkeypatch.setattr(hangs, "read_activity", lambda pid: Activity(clock[0], used[pid](clock[0] - 1000.0), 0.0, 0.0, False))
    for rank in where:
        board.write(rank, 3, phase)
    detector, found = HangDetector(board, {rank: rank for rank in where}, FakeStacks(where), None, True), None
    while found is None and clock[0] < 1000.0 + seconds:
        clock[0] += 1.0
        found = detector.check()
    return clock[0] - 1000.0, found


@pytest.mark.parametrize("at", (5.5, 9.5))
def test_a_moment_of_work_of_a_waiting_rank_is_not_the_time_that_it_took(at: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread in the background of a rank that had waited for 6 or 10 s woke up. A hung rank was then left alone ten times as long."""
    took, found = watch_activity({0: lambda passed: 0.1 * (passed > at), 1: lambda passed: 0.0}, {0: (SEND,), 1: (MINE,)}, "build", 100, monkeypatch)
    assert found is not None and found.suspect.rank == 1 and AWAITED_LIMIT <= took <= AWAITED_LIMIT + 10.0


@pytest.mark.parametrize("others", ((SEND,), (MINE,)))
def test_a_pause_in_work_is_no_hang(others: tuple[StackFrame, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank worked for longer than an idle one may take, and was ended when it paused for two seconds."""
    works = lambda passed: min(passed, 200.0) + max(passed - 202.0, 0.0)  # noqa: E731
    for waits_or_works in (lambda passed: 0.0, works) if others == (SEND,) else (works,):
        took, found = watch_activity({0: waits_or_works, 1: works}, {0: others, 1: (MINE,)}, "build", 290, monkeypatch)
        assert found is None, (took, found)


def test_an_idle_rank_is_ended_though_the_others_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """That all others wait is a reason to end an idle rank sooner, never later than if they did not wait."""
    took, found = watch_activity({0: lambda passed: min(passed, 30.0), 1: lambda passed: 0.0}, {0: (SEND,), 1: (MINE,)}, "build", 400, monkeypatch)
    assert found is not None and found.suspect.rank == 1 and IDLE_LIMIT <= took <= IDLE_LIMIT + 3


def test_a_wait_for_a_disk_is_work() -> None:
    """It moves few bytes and uses no CPU. One such moment within a long sleep does not count."""
    for waits, least, most in (({5}, 40.0, 40.0), ({*range(1, 40, 4)}, 1.0, 4.0), ({*range(1, 41)}, 0.0, 0.0)):
        history = ActivityHistory(0.0)
        history.measurements += [Activity(float(at), 0.0, 0.0, 0.0, at in waits) for at in range(1, 41)]
        assert least <= history.idle_seconds <= most, (waits, history.idle_seconds)
    assert ActivityHistory(0.0).is_busy


@pytest.mark.parametrize("spins", (False, True))
@pytest.mark.parametrize("step, passes", ((3, hangs.BUSY_LIMIT), (0, hangs.FIRST_STEP_LIMIT)))
def test_devices_that_wait_for_each_other(step: int, passes: float, spins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step may only be long, so the limit is that of a computing rank. No rank is named as being elsewhere."""
    took, found, said = watched({0: (EVENT, READ), 1: (EVENT, READ, MINE)}, monkeypatch, step=step, spins=spins, seconds=4000)
    assert found is not None and found.on_devices and passes <= took <= passes + 3
    assert said[0].startswith("note  ranks 0-1 have made no progress for 30 s") and "waiting for their devices: " in said[0]
    assert "tensors/transfers.py:37 in read on rank 0" in said[0]
    (problem,) = describe_hang(found).all_problems()
    assert problem.code == "C001" and "all ranks wait for their devices or for each other" in problem.what
    assert "it waits for its device; rank 1 in reduce, waiting for its device" in problem.why


@pytest.mark.parametrize("spins", (False, True))
def test_the_rank_that_is_elsewhere_is_blamed_not_who_waits_for_a_device(spins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it has advanced further than the others."""
    took, found, said = watched({0: (EVENT, READ), 1: (MINE,), 2: (EVENT, READ)}, monkeypatch, step=3, spins=spins, seconds=1000)
    assert found is not None and found.suspect.rank == 1 and not found.on_devices and IDLE_LIMIT <= took <= IDLE_LIMIT + 3
    assert "rank 1 has made no progress for 30 s" in said[0] and "job.py:7 in forward; ranks 0,2 wait for it" in said[0]
    assert not [line for line in said if "device" in line]


def test_a_host_that_waits_for_a_device_beside_hosts_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    took, found, said = watched({0: (SEND,), 1: (EVENT, READ)}, monkeypatch, step=3, spins=True, seconds=1000)
    assert found is not None and found.on_devices and took >= hangs.BUSY_LIMIT, "the device may compute"
    assert "waiting for their devices or for each other" in said[0]


@pytest.mark.parametrize("elsewhere", (False, True))
def test_a_rank_alone_that_waits_for_its_device(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single-rank run, or the only rank on this machine: the limit is that of a computing rank."""
    took, found, said = watched({0: (EVENT, READ)}, monkeypatch, step=3, spins=False, seconds=1000, elsewhere=elsewhere)
    assert found is not None and not found.on_devices and hangs.BUSY_LIMIT <= took <= hangs.BUSY_LIMIT + 3
    assert "rank 0 has made no progress for 30 s at step 4, reduce, waiting for its device" in said[0]
    assert "it waits for its device" in describe_hang(found).all_problems()[0].why


def test_what_waits_for_a_device() -> None:
    whole = StackFrame("/somewhere/site-packages/torch/cuda/__init__.py", "1040", "synchronize")
    assert Stack((EVENT, MINE)).is_awaiting_device and Stack((whole, MINE)).is_awaiting_device
    assert not Stack((MINE, EVENT)).is_awaiting_device and not Stack().is_awaiting_device
    other = StackFrame(whole.file, "300", "_lazy_init")
    assert not Stack((other,)).is_awaiting_device


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divides all limits by five. Only their order matters."""
    limits = "OBSERVE_AFTER STACK_AFTER REPORT_AFTER AWAITED_LIMIT AWAITED_BUSY_LIMIT IDLE_LIMIT BUSY_LIMIT FIRST_STEP_LIMIT READ_LIMIT"
    for name in (*limits.split(), "READ_BUSY_LIMIT"):
        monkeypatch.setattr(hangs, name, getattr(hangs, name) / 5)


HANGS = {
    "construct": ("dp=2", "during build", "in __init__"),
    "metrics": ("dp=2", "after step 5, evaluate", "in metrics"),
    "collective": ("dp=2", "at step 1, forward", "in forward"),
}
MORE = {
    "lock": ("fsdp=2", "at step 1, forward", "in forward"),
    "loss": ("dp=2", "at step 1, forward", "in loss"),
    "loop": ("dp=2", "at step 1, forward", "in forward"),
    "optimizer": ("dp=2", "during build", "in step"),
    "backward": ("dp=2", "at step 1, backward", "in backward"),
    "schedule": ("dp=2", "at step 1, optimizer", "in schedule"),
    "hook": ("dp=2", "at step 1, forward", "in hook"),
    "late": ("dp=2", "at step 7, forward", "in forward"),
    "recv": ("dp=2", "at step 1, forward", "in forward"),
}


@pytest.mark.parametrize("how", sampled(3, [*HANGS, *(pytest.param(how, marks=pytest.mark.prove) for how in MORE)]))
def test_a_hang_is_ended_and_named(how: str, tmp_path: Path, hasty: None) -> None:
    plan, when, where = (HANGS | MORE)[how]
    command = Command("train", JOB, "--plan", plan, "--max-restarts", "0", "--job.how", how, folder=tmp_path)
    assert command.wait(100) == 1
    assert "error[C001] rank 1 stopped making progress and blocks all other ranks" in command.output, command.output
    assert when in command.output and "jobs_hanging.py:" in command.output, command.output
    assert where in "".join(log.read_text() for log in tmp_path.glob("runs/**/rank1.log")), command.output
    assert "Traceback" not in command.output


@pytest.mark.slow
def test_a_hang_among_many_ranks_is_ended_and_named(tmp_path: Path, hasty: None) -> None:
    command = Command("train", JOB, "--plan", "dp=8", "--max-restarts", "0", "--job.how", "construct", folder=tmp_path)
    assert command.wait(200) == 1
    assert "error[C001] rank 1 stopped making progress and blocks all other ranks" in command.output, command.output


@pytest.mark.slow
def test_a_slow_read_is_named_and_not_ended(tmp_path: Path, hasty: None) -> None:
    """It sleeps far longer than other ranks may wait outside of reads."""
    command = Command("train", JOB, "--plan", "dp=2", "--job.how", "read", "--job.seconds", "9", folder=tmp_path)
    assert command.wait(100) == 0, command.output
    assert "note  rank 1 has made no progress for" in command.output and "in __getitem__" in command.output
    assert len(rows(tmp_path)) == 10


@pytest.mark.slow
def test_patience_is_the_users(tmp_path: Path) -> None:
    command = Command("train", JOB, "--plan", "dp=2", "--job.how", "read", "--job.seconds", "1000", "--hang-timeout", "2",
                      "--max-restarts", "0", folder=tmp_path)  # fmt: skip
    assert command.wait(60) == 1
    assert "error[C001] rank 1 stopped making progress" in command.output, command.output
    assert "in __getitem__" in (tmp_path / "runs/latest/logs/rank1.log").read_text()
    refused = Command("train", JOB, "--hang-timeout", "0", folder=tmp_path)
    assert refused.wait(60) == 2 and "error[U002] --hang-timeout" in refused.output


@pytest.mark.parametrize("workers", (0, 1))
def test_each_sample_counts_as_progress(workers: int) -> None:
    """Includes samples that a loader process reads."""
    board = ProgressBoard(range(2))
    board.write(1, 0, "data")
    began = board.read(1).since
    source = iter_batches(Numbers(8), 4, 0, BatchShare(), Position(), workers=workers, reads=lambda: board.mark_read(1))
    next(source)
    assert board.read(1).since > began


@pytest.mark.prove
def test_beats_come_from_loader_processes(tmp_path: Path, hasty: None) -> None:
    """Every sample takes a fraction of a second, and a batch takes longer than a rank may be silent."""
    command = Command("train", JOB, "--plan", "dp=1", "--workers", "1", "--job.how", "drip", "--job.seconds", "0.7",
                      "--job.batch", "12", "--steps", "2", "--hang-timeout", "6", folder=tmp_path)  # fmt: skip
    assert command.wait(100) == 0, command.output
