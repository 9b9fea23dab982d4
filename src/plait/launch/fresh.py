"""A fresh Python process for what this one cannot do: start ranks by forking, once it has used CUDA.

The order goes to its standard input, pickled; a job that is a value, not the name of a file, is in it with its code, by cloudpickle.
These bytes are what the asking process has made of itself, in a pipe between the two alone: nothing is unpickled that lay in a
file. What the fresh process says comes back on its output as lines of JSON; its other lines are what was printed.
"""

import contextlib
import json
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from plait.config.errors import FAILED, PlaitError, Problem, in_a_line, problem_of, trace_of
from plait.launch.child import die_with_parent
from plait.launch.failures import short
from plait.launch.stopping import WARNINGS

MARK = "\x1e"
"""Begins a line that is a message."""
NUMBERS = (signal.SIGINT, *WARNINGS)
OTHERWISE = ('put the job into a file: "path/to/job.py:function"', "start Python again, and train before CUDA is used")


def pickled(thing: object, by_value: bool) -> bytes:
    """What is asked for as bytes. `by_value`: with the code of its functions, which needs cloudpickle. U021 where that cannot be."""
    if not by_value:
        return pickle.dumps(thing)
    try:
        from cloudpickle import dumps
    except ImportError:
        what, why = "this job cannot be given to a fresh process", "it is a value, and cloudpickle is not installed"
        raise PlaitError(Problem("U021", what, why=why, fix=("pip install cloudpickle", *OTHERWISE))) from None
    try:
        return dumps(thing)
    except Exception as error:  # whatever a value's own way to be pickled raises
        what = f"this job cannot be given to a fresh process: {short(in_a_line(error))}"
        why = "a job that is a value travels there with all that its functions use"
        raise PlaitError(Problem("U021", what, why=why, fix=OTHERWISE)) from error


def ask(program: str, order: bytes, hear: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Have a fresh process run a line of Python, which calls `serve`, and return its answer. `hear` gets its messages.

    It is asked to stop as this process is, and ends with it. U022 when it ends without an answer; else what it raised.
    """
    words = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}"]
    pipe = subprocess.PIPE
    answer: dict[str, Any] = {}
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with _signals_to(process):
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(order)
                    process.stdin.close()
                for line in process.stdout:
                    message = _message(line.decode("utf-8", "replace"))
                    if message["kind"] in ("answer", "failed", "interrupted"):
                        answer = message
                    else:
                        hear(message)
        except BaseException:
            process.kill()
            raise
    if answer.get("kind") == "answer":
        return answer["value"]
    if answer.get("kind") == "interrupted":
        raise KeyboardInterrupt
    if answer.get("kind") == "failed":
        raise PlaitError(map(problem_of, answer["problems"]), answer["exit_code"], answer["trace"])
    what = f"the fresh process ended without an answer (exit status {process.returncode})"
    raise PlaitError(Problem("U022", what, why="its last lines, above, may say why"), FAILED)


def _message(line: str) -> dict[str, Any]:
    """What a line says; one that is no message was printed."""
    if line.startswith(MARK):
        return json.loads(line[len(MARK) :])
    return {"kind": "say", "text": line.rstrip("\n")}


@contextlib.contextmanager
def _signals_to(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Meanwhile requests to stop are handed on; a second Ctrl-C ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = list[int]()

    def hand_on(number: int, frame: object) -> None:
        if number == signal.SIGINT and number in heard:
            process.kill()
            raise KeyboardInterrupt
        heard.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve(work: Callable[[Any], dict[str, Any]]) -> None:
    """The life of the fresh process: take the order, do the work, and say what it came to."""
    die_with_parent()
    try:
        say({"kind": "answer", "value": work(_ordered())})
    except KeyboardInterrupt:
        say({"kind": "interrupted"})
    except PlaitError as error:
        problems = [vars(problem) for problem in error.problems]
        trace = error.trace or trace_of(error.__cause__)
        say({"kind": "failed", "problems": problems, "exit_code": error.exit_code, "trace": trace})


def say(message: dict[str, Any]) -> None:
    """From the fresh process to the one that asked."""
    sys.stdout.write(f"{MARK}{json.dumps(message)}\n")
    sys.stdout.flush()


def _ordered() -> object:
    """What this process was asked for. U021 when it cannot be made here."""
    try:
        return pickle.loads(sys.stdin.buffer.read())
    except Exception as error:
        what = f"the fresh process cannot make this job: {short(in_a_line(error))}"
        raise PlaitError(Problem("U021", what, fix=OTHERWISE)) from error
