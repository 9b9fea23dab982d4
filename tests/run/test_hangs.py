"""A rank that hangs is named and ended for; one that is slow is only named, or left alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Numbers
from launched import Command, rows
from rarely import sampled

from plait.data.batch import BatchShare, Position
from plait.data.loading import batches
from plait.launch import hangs
from plait.launch.activity import Activity, activity
from plait.launch.failures import hung
from plait.launch.hangs import (
    AWAITED,
    AWAITED_BUSY,
    GROWTH,
    IDLE,
    READS,
    READS_BUSY,
    HangDetector,
    Look,
    Stack,
    StackFrame,
    Stacks,
    limit,
    parse,
    told,
)
from plait.launch.progress import Progress, ProgressBoard

JOB = str(Path(__file__).parents[1] / "jobs_hanging.py")
SEND = StackFrame("/somewhere/site-packages/torch/distributed/distributed_c10d.py", "10", "all_reduce")
MINE = StackFrame("/home/me/job.py", "7", "forward")
EVENT = StackFrame("/somewhere/site-packages/torch/cuda/streams.py", "231", "synchronize")
READ = StackFrame(str(Path(hangs.__file__).parents[1] / "tensors/transfers.py"), "37", "read")


def look(
    rank: int, phase: str, silent: float, *, busy: bool = False, frames: tuple[StackFrame, ...] = (), step: int = 3, share: float = 1.0
) -> Look:
    """`share`: of the time that it computes it has a processor."""
    return Look(rank, Progress(step, phase, 0.0), silent, busy, Stack(frames), 0.0 if busy else silent, share * silent if busy else 0.0)


def waits(rank: int, silent: float = 30.0, phase: str = "reduce") -> Look:
    return look(rank, phase, silent, frames=(SEND,))


@pytest.mark.parametrize("suspect, others, alike, allowed", [
    (look(1, "forward", 30, frames=(MINE,)), [waits(0)], True, AWAITED),
    (look(1, "forward", 30, busy=True, frames=(MINE,)), [waits(0)], True, AWAITED_BUSY),
    (look(1, "forward", 30, busy=True, frames=(MINE,), share=0.2), [waits(0)], True, hangs.BUSY),  # the machine is busy
    (look(1, "build", 30, frames=(MINE,), step=-1), [waits(0)], True, AWAITED),
    (look(1, "evaluate", 30, frames=(MINE,)), [waits(0, phase="evaluate")], True, AWAITED),
    (look(1, "build", 30, frames=(MINE,), step=-1), [waits(0)], False, AWAITED),  # building is alike in pipelines too
    (look(1, "build", 30, busy=True, frames=(MINE,), step=-1), [waits(0)], True, hangs.FIRST),  # it may prepare data for all
    (look(1, "forward", 30, frames=(MINE,)), [waits(0)], False, IDLE),  # another stage's forward says nothing of this one
    (look(1, "forward", 30, busy=True, frames=(MINE,)), [waits(0)], False, hangs.BUSY),
    (look(1, "forward", 30, frames=(MINE,)), [waits(0), look(2, "forward", 1, busy=True)], True, IDLE),
    (look(1, "forward", 30, frames=(MINE,)), [look(0, "forward", 30, frames=(SEND, MINE))], True, IDLE),  # a user's barrier
    (look(1, "forward", 30, frames=(MINE,)), [look(0, "reduce", 30, frames=(EVENT, READ))], True, IDLE),  # devices may compute
    (look(1, "forward", 30, busy=True, frames=(MINE,)), [look(0, "reduce", 30, frames=(EVENT, READ))], True, hangs.BUSY),
    (look(0, "forward", 30, frames=(MINE,)), [], True, IDLE),
    (look(1, "data", 300, frames=(MINE,)), [waits(0)], True, READS),
    (look(1, "evaluation data", 300, busy=True, frames=(MINE,)), [waits(0)], True, READS_BUSY),
    (look(1, "checkpoint", 120, frames=(MINE,)), [waits(0)], True, READS),
    (look(1, "forward", 90, busy=True, frames=(StackFrame("/x/site-packages/torch/_inductor/codecache.py", "1", "load"),)),
     [waits(0)], True, READS_BUSY),
])  # fmt: skip
def test_how_long_a_rank_may_go_on(suspect: Look, others: list[Look], alike: bool, allowed: float) -> None:
    assert limit(suspect, others, alike, 0.0, None)[0] == allowed
    assert limit(suspect, others, alike, 100.0, None)[0] == max(allowed, GROWTH * 100.0)
    assert limit(suspect, others, alike, 100.0, 5.0)[0] == 5.0


def test_the_time_that_others_took_counts() -> None:
    """Rank 0 computed for 20 s and has waited for 10: rank 1 may take ten times as long."""
    slow = waits(0)
    slow.waited = 10.0
    allowed, passed = limit(look(1, "forward", 30, busy=True, frames=(MINE,)), [slow], True, 0.0, None)
    assert (allowed, passed) == (GROWTH * 20.0, 10.0)


def test_whose_code_a_stack_is_in() -> None:
    queue = StackFrame(os.__file__.replace("os.py", "queue.py"), "1", "get")
    assert MINE.owner == "user" and queue.owner == "python" and SEND.owner == "torch.distributed"
    assert Stack((queue, SEND, MINE)).communicates and Stack((queue, SEND, MINE)).asked_by_user
    assert not Stack((queue, MINE, SEND)).communicates
    assert Stack((queue, MINE)).where == "/home/me/job.py:7 in forward"
    reducer = StackFrame(str(Path(hangs.__file__).parents[1] / "reducer.py"), "1", "finish")
    assert Stack((SEND, reducer, MINE)).communicates and not Stack((SEND, reducer, MINE)).asked_by_user


def test_a_stack_is_parsed() -> None:
    text = 'Stack (most recent call first):\n  File "/b c.py", line 22 in mine\n  File "/d.py", line 3 in <module>\n'
    assert parse(text).frames == (StackFrame("/b c.py", "22", "mine"), StackFrame("/d.py", "3", "<module>"))
    assert parse("").frames == ()


@pytest.fixture
def sleeping() -> Iterator[tuple[Stacks, list[int]]]:
    stacks, pids = Stacks(range(2)), list[int]()
    for rank in range(2):
        pids.append(os.fork())
        if pids[-1] == 0:
            stacks.answer(rank)
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
        if found := stacks.ask(rank, pid).frames:
            return found
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} does not answer")


def test_a_process_that_sleeps_says_where(sleeping: tuple[Stacks, list[int]]) -> None:
    stacks, pids = sleeping
    found = answer(stacks, 0, pids[0])
    assert found[0].name == "sleeping" and found[0].file == __file__
    assert os.waitpid(pids[0], os.WNOHANG) == (0, 0)


def test_an_answer_that_comes_late_is_no_other_ranks(sleeping: tuple[Stacks, list[int]]) -> None:
    stacks, pids = sleeping
    for rank, pid in enumerate(pids):
        answer(stacks, rank, pid)
        os.kill(pid, signal.SIGSTOP)
    assert stacks.ask(0, pids[0], 0.1).frames == ()
    threading.Timer(0.3, os.kill, (pids[0], signal.SIGCONT)).start()
    assert stacks.ask(1, pids[1], 1.0).frames == ()


def test_a_process_without_the_handler_is_not_signalled() -> None:
    other = subprocess.Popen(["sleep", "100"])
    stacks = Stacks([0])
    try:
        assert stacks.ask(0, other.pid).frames == ()
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
        for _ in range(10):  # a loaded machine may not let it run for a while
            time.sleep(0.3)
            before = activity(process.pid)
            time.sleep(0.7)
            seen = activity(process.pid).busy_since(before)
            if seen == busy:
                break
        assert seen == busy
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_process_that_waits_for_a_processor_does_not_sleep() -> None:
    """One of low priority beside many others had 1.5 % of a core, and was ended as one that uses nothing."""
    before = Activity(0.0, 0.0, 0.0, 0.0, False)
    assert Activity(10.0, 0.15, 0.0, 0.0, False, delayed=9.0).busy_since(before)
    assert not Activity(10.0, 0.15, 0.0, 0.0, False, delayed=3.0).busy_since(before), "it looks now and then, on a busy machine"
    ready = Activity(0.0, 0.1, 0.0, 0.0, False, is_ready=True)
    assert Activity(10.0, 0.1, 0.0, 0.0, False, is_ready=True).busy_since(ready), "the kernel has counted nothing yet: it got no processor"
    assert not Activity(10.0, 0.15, 0.0, 0.0, False, is_ready=True).busy_since(ready), "it was seen while it looked, twice"
    assert not Activity(10.0, 0.1, 0.0, 0.0, False).busy_since(ready)
    assert activity(os.getpid()).is_ready


def test_progress_of_a_reader_is_its_ranks_while_it_reads() -> None:
    board = ProgressBoard(range(2))
    board.write(1, 4, "data")
    began = board.read(1).since
    time.sleep(0.01)
    board.reads(1)
    assert board.read(1).since > began and board.read(1).step == 4
    board.write(1, 4, "forward")
    began = board.read(1).since
    board.reads(1)  # a loader fetches ahead; that does not show that the rank moves
    assert board.read(1).since == began
    board.within(1, "reduce")
    assert (board.read(1).phase, board.read(1).step) == ("reduce", 4)


def test_a_suspended_launcher_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    board, stacks, clock = ProgressBoard(range(1)), Stacks([0]), [1000.0]
    monkeypatch.setattr("plait.launch.hangs.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("plait.launch.progress.time.monotonic", lambda: clock[0])
    board.write(0, 3, "forward")
    detector = HangDetector(board, {0: os.getpid()}, stacks, 5.0, True)
    assert detector.check() is None
    clock[0] += 10_000.0
    assert detector.check() is None and not list(detector.names())
    stacks.close()


def test_one_line_on_silent_ranks() -> None:
    group, waiting = [look(1, "forward", 8.2, busy=True, frames=(MINE,))], [waits(0), waits(2)]
    text = told(group, waiting, {}, logs=True)
    assert text == (
        "note  rank 1 has made no progress for 8 s at step 4, forward, at work: /home/me/job.py:7 in forward;"
        " ranks 0,2 wait for it (stack in logs/rank1.log)"
    )
    assert told(group, waiting, {1: "the dry run"}, logs=False) == (
        "note  the dry run has made no progress for 8 s at step 4, forward, at work: /home/me/job.py:7 in forward; ranks 0,2 wait for it"
    )


@pytest.mark.parametrize("share, named", ((1.0, (30, 34)), (0.25, (120, 126))))
def test_a_rank_that_computes_is_named_by_its_processor_time(share: float, named: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """`share`: of a core, which is what a busy machine leaves it."""
    clock, board = [1000.0], ProgressBoard(range(1))
    for module in ("hangs", "progress"):
        monkeypatch.setattr(f"plait.launch.{module}.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(hangs, "stopped", lambda pid: False)
    monkeypatch.setattr(hangs, "activity", lambda pid: Activity(clock[0], share * clock[0], 0.0, 0.0, False))
    board.write(0, 3, "forward")
    detector = HangDetector(board, {0: 0}, FakeStacks({0: (MINE,)}), None, True)
    while not (said := [*detector.names()]):
        clock[0] += 1.0
        assert clock[0] < 1200 and detector.check() is None
    assert named[0] <= clock[0] - 1000 <= named[1] and said[0][0][0].busy


class FakeStacks(Stacks):
    """What processes would answer, by their ids."""

    def __init__(self, frames: dict[int, tuple[StackFrame, ...]]):
        self.frames = frames

    def ask(self, rank: int, pid: int, patience: float = 0.5) -> Stack:
        return Stack(self.frames[pid])


def watched(frames: dict[int, tuple[StackFrame, ...]], monkeypatch: pytest.MonkeyPatch, *, step: int, spins: bool, seconds: int,
            elsewhere: bool = False) -> tuple[float, hangs.Hang | None, list[str]]:  # fmt: skip
    """(after how many seconds ranks that stand still were ended for, if they were; for whom; what was said of them before).
    `spins`: those that wait for a device use the processor."""
    clock, board = [1000.0], ProgressBoard(range(len(frames)))
    monkeypatch.setattr("plait.launch.hangs.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("plait.launch.progress.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(hangs, "stopped", lambda pid: False)
    spent = lambda pid: clock[0] * (spins and frames[pid][0] == EVENT)  # noqa: E731
    monkeypatch.setattr(hangs, "activity", lambda pid: Activity(clock[0], spent(pid), 0.0, 0.0, False))
    for rank, row in frames.items():
        board.write(rank, step, "forward" if row[0] == MINE else "reduce")
    detector, said = HangDetector(board, {rank: rank for rank in frames}, FakeStacks(frames), None, True, elsewhere), list[str]()
    while clock[0] < 1000.0 + seconds:
        clock[0] += 1.0
        found = detector.check()
        said += [told(*group, {}, logs=True) for group in detector.names()]
        if found is not None:
            return clock[0] - 1000.0, found, said
    return float(seconds), None, said


@pytest.mark.parametrize("spins", (False, True))
@pytest.mark.parametrize("step, passes", ((3, hangs.BUSY), (0, hangs.FIRST)))
def test_devices_that_wait_for_each_other(step: int, passes: float, spins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a long step, so it is ended when a rank that computes would be; nobody is said to be elsewhere."""
    took, found, said = watched({0: (EVENT, READ), 1: (EVENT, READ, MINE)}, monkeypatch, step=step, spins=spins, seconds=4000)
    assert found is not None and found.devices and passes <= took <= passes + 3
    assert said[0].startswith("note  ranks 0-1 have made no progress for 30 s") and "waiting for their devices: " in said[0]
    assert "tensors/transfers.py:37 in read on rank 0" in said[0]
    (problem,) = hung(found).all_problems()
    assert problem.code == "C001" and "all ranks wait for their devices or for each other" in problem.what
    assert "it waits for its device; rank 1 in reduce, waiting for its device" in problem.why


@pytest.mark.parametrize("spins", (False, True))
def test_the_rank_that_is_elsewhere_is_blamed_not_who_waits_for_a_device(spins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it has come farther than the others."""
    took, found, said = watched({0: (EVENT, READ), 1: (MINE,), 2: (EVENT, READ)}, monkeypatch, step=3, spins=spins, seconds=1000)
    assert found is not None and found.look.rank == 1 and not found.devices and IDLE <= took <= IDLE + 3
    assert "rank 1 has made no progress for 30 s" in said[0] and "job.py:7 in forward; ranks 0,2 wait for it" in said[0]
    assert not [line for line in said if "device" in line]


def test_a_host_that_waits_for_a_device_beside_hosts_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    took, found, said = watched({0: (SEND,), 1: (EVENT, READ)}, monkeypatch, step=3, spins=True, seconds=1000)
    assert found is not None and found.devices and took >= hangs.BUSY, "the device may compute"
    assert "waiting for their devices or for each other" in said[0]


@pytest.mark.parametrize("elsewhere", (False, True))
def test_a_rank_alone_that_waits_for_its_device(elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, or on this machine: it is ended when one that computes would be."""
    took, found, said = watched({0: (EVENT, READ)}, monkeypatch, step=3, spins=False, seconds=1000, elsewhere=elsewhere)
    assert found is not None and not found.devices and hangs.BUSY <= took <= hangs.BUSY + 3
    assert "rank 0 has made no progress for 30 s at step 4, reduce, waiting for its device" in said[0]
    assert "it waits for its device" in hung(found).all_problems()[0].why


def test_what_waits_for_a_device() -> None:
    whole = StackFrame("/somewhere/site-packages/torch/cuda/__init__.py", "1040", "synchronize")
    assert Stack((EVENT, MINE)).awaits_device and Stack((whole, MINE)).awaits_device
    assert not Stack((MINE, EVENT)).awaits_device and not Stack().awaits_device
    other = StackFrame(whole.file, "300", "_lazy_init")
    assert not Stack((other,)).awaits_device


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits a fifth as long: the order between them is what counts."""
    for name in ("LOOK", "STACK", "NAMED", "AWAITED", "AWAITED_BUSY", "IDLE", "BUSY", "FIRST", "READS", "READS_BUSY"):
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
    assert "error[C001] rank 1 stopped making progress and holds everyone up" in command.output, command.output
    assert when in command.output and "jobs_hanging.py:" in command.output, command.output
    assert where in "".join(log.read_text() for log in tmp_path.glob("runs/**/rank1.log")), command.output
    assert "Traceback" not in command.output


@pytest.mark.slow
def test_a_slow_read_is_named_and_not_ended(tmp_path: Path, hasty: None) -> None:
    """It sleeps far longer than the others may wait elsewhere."""
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
    """Also one that is read in a loader process."""
    board = ProgressBoard(range(2))
    board.write(1, 0, "data")
    began = board.read(1).since
    source = batches(Numbers(8), 4, 0, BatchShare(), Position(), workers=workers, reads=lambda: board.reads(1))
    next(source)
    assert board.read(1).since > began


@pytest.mark.prove
def test_beats_come_from_loader_processes(tmp_path: Path, hasty: None) -> None:
    """Every sample takes a fraction of a second, a batch longer than a rank may be silent."""
    command = Command("train", JOB, "--plan", "dp=1", "--workers", "1", "--job.how", "drip", "--job.seconds", "0.7",
                      "--job.batch", "12", "--steps", "2", "--hang-timeout", "6", folder=tmp_path)  # fmt: skip
    assert command.wait(100) == 0, command.output
