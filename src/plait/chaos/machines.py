"""Machines, links and agents that are lost, in a run over two machines (`hosts.py`), each with half of the ranks.

What goes on with all ranks ends as the undisturbed run, bit for bit; what goes on with fewer has another plan, and another order of sums.
"""

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable

from plait.chaos.hosts import Hosts
from plait.chaos.scene import UNHURRIED, Fault, Outcome, Scene
from plait.chaos.strike import Strike
from plait.chaos.watched import Watched
from plait.config.errors import RESUMABLE
from plait.launch import gate

Act = Callable[[Scene, list[Watched], Hosts], None]


def _free_port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return int(asking.getsockname()[1])


def _hosts(scene: Scene) -> Hosts:
    hosts = scene.setting.hosts
    scene.needs("it needs root and network namespaces", hosts is not None)
    scene.needs("the plan has an odd number of ranks for two nodes", scene.world % 2 == 0)
    assert hosts is not None
    return hosts


def _both(scene: Scene, *strikes: Strike, port: int = 0) -> list[Watched]:
    """The same command on both."""
    hosts = _hosts(scene)
    master = f"{hosts[0].address}:{port or _free_port()}"
    words = ("--nnodes", "2", "--master", master, "--node-rank")
    return [scene.start(*words, str(n), strikes=strikes, before=host.enter) for n, host in enumerate(hosts)]


def ends(act: Act, says: str, witness: int, within: float) -> Callable[[Scene], Outcome]:
    """After `act` the run ends, and the machine `witness` says of what; with --resume it goes on from the newest checkpoint."""

    def pose(scene: Scene) -> Outcome:
        hosts = _hosts(scene)
        runs = _both(scene)
        runs[0].reaches(scene.a_step())
        since = time.monotonic()
        act(scene, runs, hosts)
        for run in (runs[witness], runs[1 - witness]):
            run.wait()
        runs[witness].look()
        scene.told(runs[witness], since, says, within=within)
        scene.expect(runs[witness].code == 1, f"exit code {runs[witness].code}, not 1")
        scene.resume(lost=scene.since_checkpoint)
        return scene.measured

    return pose


def without(act: Act, within: float, back: bool = False, silent: bool = False) -> Callable[[Scene], Outcome]:
    """After `act` machine 0 goes on alone, and with `back` with machine 1 again, where the same command is started once more.

    `silent`: connections stay open, so the ranks that are left notice nothing, and put nothing away.
    """

    def pose(scene: Scene) -> Outcome:
        hosts, port = _hosts(scene), _free_port()
        slow = Strike("slow", "forward", rank=0, times=999, text="1.5", always=True) if back else UNHURRIED
        runs = _both(scene, slow, port=port)
        runs[0].reaches(scene.a_step())
        since = time.monotonic()
        act(scene, runs, hosts)
        if back:
            runs[0].until(lambda: runs[0].told("note  round 1") is not None, "a round without machine 1")
            words = ("--nnodes", "2", "--master", f"{hosts[0].address}:{port}", "--node-rank", "1")
            runs.append(scene.start(*words, strikes=(slow,), before=hosts[1].enter))
        code = runs[0].wait()
        if back:
            returned = runs[2].wait()
            scene.expect(returned == 0, f"the node that joined again ended with exit code {returned}")
            scene.expect(runs[0].told("note  round 2") is not None, "it did not join again")
        scene.told(runs[0], since, "note  machine 1", "restarting with fewer ranks", within=within)
        if scene.expect(code == 0, f"exit code {code}: {runs[0].lines[-1][1][:90] if runs[0].lines else ''}"):
            scene.after(runs[0], since)
            scene.near()
            scene.bounded(scene.since_checkpoint if silent else scene.allowed)
        return scene.measured

    return pose


def _rank(scene: Scene) -> Outcome:
    _hosts(scene)
    strike = Strike("kill", "backward", scene.a_step(), scene.world - 1)
    runs = _both(scene, strike)
    codes = [run.wait() for run in runs]
    scene.told(runs[0], scene.mark().time, f"rank {strike.rank} was killed (SIGKILL)", "restarting", within=15.0)
    if scene.expect(codes == [0, 0], f"exit codes {codes}"):
        scene.after(runs[0])
        scene.equal()
        scene.bounded(scene.allowed)
    return scene.measured


def _lost(number: int) -> Act:
    return lambda scene, runs, hosts: runs[number].end()


def _agent(scene: Scene, runs: list[Watched], hosts: Hosts) -> None:
    os.kill(runs[1].pid, signal.SIGKILL)


def _store(scene: Scene, runs: list[Watched], hosts: Hosts) -> None:
    """The process that holds the store, and the gate before it: the first that the launcher of machine 0 forked."""
    os.kill(runs[0].forked()[0], signal.SIGKILL)


def _unplugged(scene: Scene, runs: list[Watched], hosts: Hosts) -> None:
    hosts[1].link(False)
    scene.undo.append(lambda: hosts[1].link(True))
    for run in runs:
        run.wait()
    hosts[1].link(True)


def _undisturbed(act: Act) -> Callable[[Scene], Outcome]:
    """After `act` the run goes on as if nothing had been."""

    def pose(scene: Scene) -> Outcome:
        hosts = _hosts(scene)
        runs = _both(scene)
        runs[0].reaches(scene.setting.every)
        act(scene, runs, hosts)
        codes = [run.wait() for run in runs]
        if scene.expect(codes == [0, 0], f"exit codes {codes}: {runs[0].lines[-1][1][:90] if runs[0].lines else ''}"):
            scene.measured.lost = 0
            scene.expect(runs[0].told("restarting") is None, "ranks were restarted although none was lost")
            scene.equal()
        return scene.measured

    return pose


def _flaps(scene: Scene, runs: list[Watched], hosts: Hosts) -> None:
    hosts[1].link(False)
    time.sleep(2.0)
    hosts[1].link(True)


def _slows(scene: Scene, runs: list[Watched], hosts: Hosts) -> None:
    for host in hosts:
        host.slow(200, 50)
        scene.undo.append(host.fast)


def _knock(address: str, port: int, draw: bytes) -> None:
    """Nothing, nonsense, a flood, and a wrong key, at the gate."""
    held = list[socket.socket]()
    for word in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(4 << 20), draw):
        with contextlib.suppress(OSError):
            one = socket.create_connection((address, port), 2.0)
            one.settimeout(0.5)
            held.append(one)
            one.sendall(word)
    with contextlib.suppress(Exception):
        asyncio.run(gate.through(address, port, draw[:32]))
    time.sleep(60.0)


def _strangers(scene: Scene) -> Outcome:
    hosts, port = _hosts(scene), _free_port()
    runs = _both(scene, port=port)
    runs[0].reaches(2)
    draw = scene.draw.randbytes(1 << 12)

    def work() -> None:
        hosts[1].enter()
        _knock(hosts[0].address, port, draw)

    scene.helper(work)
    codes = [run.wait() for run in runs]
    if scene.expect(codes == [0, 0], f"exit codes {codes}"):
        scene.measured.lost = 0
        scene.equal()
    return scene.measured


def _taken(scene: Scene) -> Outcome:
    """Another program listens at the port that was given for the store."""
    hosts, port = _hosts(scene), _free_port()
    reading, writing = os.pipe()

    def work() -> None:
        hosts[0].enter()
        with socket.create_server((hosts[0].address, port)):
            os.write(writing, b".")
            time.sleep(60.0)

    scene.helper(work)
    os.read(reading, 1)
    for end in (reading, writing):
        os.close(end)
    since = time.monotonic()
    words = ("--nnodes", "2", "--master", f"{hosts[0].address}:{port}", "--node-rank", "0")
    run = scene.start(*words, before=hosts[0].enter)
    code = run.wait()
    scene.told(run, since, f"port {port} of", "is in use", within=15.0)
    scene.expect(code == 1, f"exit code {code}, not 1")
    return scene.measured


def _stopped(scene: Scene) -> Outcome:
    _hosts(scene)
    runs = _both(scene)
    runs[0].reaches(scene.a_step())
    since = time.monotonic()
    os.kill(runs[1].pid, signal.SIGTERM)
    codes = [run.wait() for run in runs]
    scene.expect(codes == [RESUMABLE, RESUMABLE], f"exit codes {codes}")
    scene.told(runs[0], since, "stopped at step", within=15.0)
    scene.resume(lost=0)
    return scene.measured


ENDS = "reported, exit 1; --resume on the remaining nodes continues"
ALONE = "reported; continues on the remaining node, under another plan"
FAULTS = (
    Fault("node-rank", "kill -9 of a rank on one of two nodes", "reported; restarted on both nodes, with the same final weights", _rank),
    Fault("node-lost", "kill -9 of all processes on node 1", ALONE, without(_lost(1), 15.0)),
    Fault("node-back", "kill -9 of all processes on node 1, and a new start of its command",
          f"{ALONE}; node 1 joins again after a step", without(_lost(1), 15.0, back=True)),
    Fault("agent-killed", "kill -9 of the launcher on node 1", ALONE, without(_agent, 15.0)),
    Fault("node-zero-lost", "kill -9 of all processes on node 0, which has the store",
          ENDS, ends(_lost(0), "error[C009] machine 0", 1, 15.0)),
    Fault("store-killed", "kill -9 of the store's process",
          ENDS, ends(_store, "error[C009] machine 0", 1, 15.0)),
    Fault("link-down", "the link between two nodes is down for good",
          f"{ALONE}, after half a minute; the other node ends", without(_unplugged, 45.0, silent=True)),
    Fault("link-flaps", "the link is down for two seconds", "no false alarm: the run continues", _undisturbed(_flaps)),
    Fault("link-slow", "the link slows down to 200 Mbit/s during the run",
          "no false alarm: the run continues", _undisturbed(_slows)),
    Fault("node-strangers", "random bytes, floods of connections and a wrong key at the store's gate",
          "rejected; the run is undisturbed", _strangers),
    Fault("port-taken", "another program has the store's port",
          "reported with the port before any rank waits, exit 1", _taken),
    Fault("node-sigterm", "SIGTERM on one of two nodes",
          "both nodes stop after their step and save, exit 75; --resume loses no step", _stopped),
)  # fmt: skip
