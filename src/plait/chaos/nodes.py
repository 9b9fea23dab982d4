"""Lost nodes, links and launchers in a run over two nodes (`hosts.py`), each with half of the ranks.

A run that continues with all ranks must equal the run without faults bit for bit. A run that continues with fewer ranks has another plan
and another order of sums.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

from plait.chaos.hosts import Hosts
from plait.chaos.scene import SLOW_STRIKE, Fault, Outcome, Scene
from plait.chaos.strike import Strike
from plait.chaos.watched_run import WatchedRun
from plait.config.errors import RESUMABLE
from plait.launch import gate

Act = Callable[[Scene, list[WatchedRun], Hosts], None]


def _find_free_port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


def _require_hosts(scene: Scene) -> Hosts:
    hosts = scene.setting.hosts
    scene.require("this fault needs root and network namespaces", hosts is not None)
    scene.require("the plan has an odd number of ranks for two nodes", scene.world % 2 == 0)
    assert hosts is not None
    return hosts


def _start_both(scene: Scene, *strikes: Strike, port: int = 0) -> list[WatchedRun]:
    """Start the same command on both nodes."""
    hosts = _require_hosts(scene)
    master = f"{hosts[0].address}:{port or _find_free_port()}"
    words = ("--nnodes", "2", "--master", master, "--node-rank")
    return [scene.start(*words, str(n), strikes=strikes, before=host.enter) for n, host in enumerate(hosts)]


def _wait_for_all(runs: list[WatchedRun]) -> list[int | None]:
    """Wait for the end of all runs, and read the output of each meanwhile: a run whose pipe is full stands still. Returns the exit codes."""

    def have_ended() -> bool:
        for run in runs:
            run.poll()
        return all(run.code is not None for run in runs)

    runs[0].wait_until(have_ended, "the end of all nodes")
    return [run.code for run in runs]


def pose_ending(act: Act, says: str, witness: int, within: float) -> Callable[[Scene], Outcome]:
    """After `act`, the run must end and node `witness` report the reason. --resume must continue from the newest checkpoint."""

    def pose(scene: Scene) -> Outcome:
        hosts = _require_hosts(scene)
        runs = _start_both(scene)
        runs[0].wait_for_step(scene.draw_step())
        since = time.monotonic()
        act(scene, runs, hosts)
        _wait_for_all(runs)
        scene.expect_lines(runs[witness], since, says, within=within)
        scene.expect(runs[witness].code == 1, f"exit code {runs[witness].code}, not 1")
        scene.resume(lost=scene.checkpoint_loss)
        return scene.outcome

    return pose


def pose_lost_node(act: Act, within: float, rejoins: bool = False, silent: bool = False) -> Callable[[Scene], Outcome]:
    """After `act`, node 0 must continue alone, and node 1 must end. With `rejoins`, the command on node 1 is started again, and node 1 must join.

    `silent`: connections stay open, so the remaining ranks notice nothing and save nothing.
    """

    def pose(scene: Scene) -> Outcome:
        hosts, port = _require_hosts(scene), _find_free_port()
        scene.require_other_plans()
        slow = Strike("slow", "forward", rank=0, times=999, text="1.5", always=True) if rejoins else SLOW_STRIKE
        runs = _start_both(scene, slow, port=port)
        runs[0].wait_for_step(scene.draw_step())
        since = time.monotonic()
        act(scene, runs, hosts)
        if rejoins:
            runs[0].wait_until(lambda: runs[0].find_line("note  round 1") is not None, "a round without machine 1")
            words = ("--nnodes", "2", "--master", f"{hosts[0].address}:{port}", "--node-rank", "1")
            runs.append(scene.start(*words, strikes=(slow,), before=hosts[1].enter))
        code, lost, *joined = _wait_for_all(runs)
        if rejoins:
            scene.expect(joined == [0], f"node 1, which joined again, ended with exit code {joined[0]}")
            scene.expect(runs[0].find_line("note  round 2") is not None, "node 1 did not join again")
        scene.expect_lines(runs[0], since, "note  machine 1", "restarting with fewer ranks", within=within)
        if silent:
            reports = runs[1].find_line("error[C009] machine 0") is not None
            scene.expect(reports and lost == 1, f"the isolated node 1 did not report it: exit code {lost}")
        if scene.expect(code == 0, f"exit code {code}: {runs[0].lines[-1][1][:90] if runs[0].lines else ''}"):
            scene.measure_recovery(runs[0], since)
            scene.expect_close()
            scene.expect_lost_at_most(scene.checkpoint_loss if silent else scene.allowed_loss)
        return scene.outcome

    return pose


def _pose_lost_rank(scene: Scene) -> Outcome:
    _require_hosts(scene)
    strike = Strike("kill", "backward", scene.draw_step(), scene.world - 1)
    runs = _start_both(scene, strike)
    codes = _wait_for_all(runs)
    scene.expect_lines(runs[0], scene.find_mark().time, f"rank {strike.rank} was killed (SIGKILL)", "restarting", within=15.0)
    if scene.expect(codes == [0, 0], f"exit codes {codes}"):
        scene.measure_recovery(runs[0])
        scene.expect_equal()
        scene.expect_lost_at_most(scene.allowed_loss)
    return scene.outcome


def _make_node_kill(number: int) -> Act:
    return lambda scene, runs, hosts: runs[number].kill()


def _kill_agent(scene: Scene, runs: list[WatchedRun], hosts: Hosts) -> None:
    os.kill(runs[1].pid, signal.SIGKILL)


def _kill_store(scene: Scene, runs: list[WatchedRun], hosts: Hosts) -> None:
    """Kill the process of the store and its gate: the first process that the launcher of node 0 forks."""
    os.kill(runs[0].list_forked()[0], signal.SIGKILL)


def _unplug_link(scene: Scene, runs: list[WatchedRun], hosts: Hosts) -> None:
    hosts[1].set_link(False)
    scene.undo.append(lambda: hosts[1].set_link(True))
    _wait_for_all(runs)
    hosts[1].set_link(True)


def _pose_undisturbed(act: Act) -> Callable[[Scene], Outcome]:
    """After `act`, the run must continue undisturbed."""

    def pose(scene: Scene) -> Outcome:
        hosts = _require_hosts(scene)
        runs = _start_both(scene)
        runs[0].wait_for_step(scene.setting.save_every)
        act(scene, runs, hosts)
        codes = _wait_for_all(runs)
        if scene.expect(codes == [0, 0], f"exit codes {codes}: {runs[0].lines[-1][1][:90] if runs[0].lines else ''}"):
            scene.outcome.lost = 0
            scene.expect(runs[0].find_line("restarting") is None, "ranks were restarted although none was lost")
            scene.expect_equal()
        return scene.outcome

    return pose


def _flap_link(scene: Scene, runs: list[WatchedRun], hosts: Hosts) -> None:
    hosts[1].set_link(False)
    time.sleep(2.0)
    hosts[1].set_link(True)


def _slow_links(scene: Scene, runs: list[WatchedRun], hosts: Hosts) -> None:
    for host in hosts:
        host.slow_link(200, 50)
        scene.undo.append(host.restore_link)


def _flood_gate(address: str, port: int, draw: bytes) -> None:
    """Send nothing, nonsense, a flood, and a wrong key to the gate."""
    held = list[socket.socket]()
    for word in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4 << 20), draw):
        with contextlib.suppress(OSError):
            one = socket.create_connection((address, port), 2.0)
            one.settimeout(0.5)
            held.append(one)
            one.sendall(word)
    with contextlib.suppress(Exception):
        asyncio.run(gate.connect_gate(address, port, draw[:32]))
    time.sleep(60.0)


def _pose_gate_strangers(scene: Scene) -> Outcome:
    hosts, port = _require_hosts(scene), _find_free_port()
    runs = _start_both(scene, port=port)
    runs[0].wait_for_step(2)
    draw = scene.rng.randbytes(1 << 12)

    def work() -> None:
        hosts[1].enter()
        _flood_gate(hosts[0].address, port, draw)

    scene.start_helper(work)
    codes = _wait_for_all(runs)
    if scene.expect(codes == [0, 0], f"exit codes {codes}"):
        scene.outcome.lost = 0
        scene.expect_equal()
    return scene.outcome


def _pose_taken_port(scene: Scene) -> Outcome:
    """Another program listens at the store's port."""
    hosts, port = _require_hosts(scene), _find_free_port()
    reading, writing = os.pipe()

    def work() -> None:
        hosts[0].enter()
        with socket.create_server((hosts[0].address, port)):
            os.write(writing, b".")
            time.sleep(60.0)

    scene.start_helper(work)
    os.read(reading, 1)
    for end in (reading, writing):
        os.close(end)
    since = time.monotonic()
    words = ("--nnodes", "2", "--master", f"{hosts[0].address}:{port}", "--node-rank", "0")
    run = scene.start(*words, before=hosts[0].enter)
    code = run.wait()
    scene.expect_lines(run, since, f"port {port} of", "is in use", within=15.0)
    scene.expect(code == 1, f"exit code {code}, not 1")
    return scene.outcome


def _pose_node_stop(scene: Scene) -> Outcome:
    _require_hosts(scene)
    runs = _start_both(scene)
    runs[0].wait_for_step(scene.draw_step())
    since = time.monotonic()
    os.kill(runs[1].pid, signal.SIGTERM)
    codes = _wait_for_all(runs)
    scene.expect(codes == [RESUMABLE, RESUMABLE], f"exit codes {codes}")
    scene.expect_lines(runs[0], since, "stopped at step", within=15.0)
    scene.resume(lost=0)
    return scene.outcome


ENDING_PROMISE = "reported, exit 1; --resume on the remaining nodes continues"
SHRINK_PROMISE = "reported; continues on the remaining node, under another plan"
FAULTS = (
    Fault("node-rank", "kill -9 of a rank on one of two nodes", "reported; restarted on both nodes, with the same final weights", _pose_lost_rank),
    Fault("node-lost", "kill -9 of all processes on node 1", SHRINK_PROMISE, pose_lost_node(_make_node_kill(1), 15.0)),
    Fault("node-back", "kill -9 of all processes on node 1, and a new start of its command",
          f"{SHRINK_PROMISE}; node 1 joins again after a step", pose_lost_node(_make_node_kill(1), 15.0, rejoins=True)),
    Fault("agent-killed", "kill -9 of the launcher on node 1", SHRINK_PROMISE, pose_lost_node(_kill_agent, 15.0)),
    Fault("node-zero-lost", "kill -9 of all processes on node 0, which has the store",
          ENDING_PROMISE, pose_ending(_make_node_kill(0), "error[C009] machine 0", 1, 15.0)),
    Fault("store-killed", "kill -9 of the store's process",
          ENDING_PROMISE, pose_ending(_kill_store, "error[C009] machine 0", 1, 15.0)),
    Fault("link-down", "the link between two nodes is down for good",
          f"{SHRINK_PROMISE}, after half a minute; the other node ends", pose_lost_node(_unplug_link, 45.0, silent=True)),
    Fault("link-flaps", "the link is down for two seconds", "no false alarm: the run continues", _pose_undisturbed(_flap_link)),
    Fault("link-slow", "the link slows down to 200 Mbit/s during the run",
          "no false alarm: the run continues", _pose_undisturbed(_slow_links)),
    Fault("node-strangers", "random bytes, floods of connections and a wrong key at the store's gate",
          "rejected; the run is undisturbed", _pose_gate_strangers),
    Fault("port-taken", "another program has the store's port",
          "reported with the port before any rank waits, exit 1", _pose_taken_port),
    Fault("node-sigterm", "SIGTERM on one of two nodes",
          "both nodes stop after their step and save, exit 75; --resume loses no step", _pose_node_stop),
)  # fmt: skip
