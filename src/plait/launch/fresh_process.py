"""Start ranks from a new Python process, if this process cannot fork because it has used CUDA.

The request goes to its standard input, pickled. A job that is a value, and not a file, is in the request with its code, by cloudpickle.
These bytes come only from the requesting process, through a private pipe; nothing is unpickled from a file. The new process writes messages
to its output as lines of JSON; its other lines are printed text.
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

from plait.config.errors import FAILED, PlaitError, Problem, format_trace, parse_problem, summarize_error
from plait.launch.child import die_with_parent
from plait.launch.failures import format_first_line
from plait.launch.stopping import WARNING_SIGNALS

MESSAGE_MARK = "\x1e"
"""First character of a line that is a message."""
RELAYED_SIGNALS = (signal.SIGINT, *WARNING_SIGNALS)
FIXES = ('put the job into a file: "path/to/job.py:function"', "start Python again, and train before CUDA is used")


def pickle_request(thing: object, by_value: bool) -> bytes:
    """Pickle a request. `by_value`: with the code of its functions, which needs cloudpickle. Raises U021 if that fails."""
    if not by_value:
        return pickle.dumps(thing)
    try:
        from cloudpickle import dumps
    except ImportError:
        what, why = "this job cannot be sent to a new process", "the job is a value and not a file, and cloudpickle is not installed"
        raise PlaitError(Problem("U021", what, why=why, fix=("pip install cloudpickle", *FIXES))) from None
    try:
        return dumps(thing)
    except Exception as error:  # a value's own pickling may raise anything
        what = f"this job cannot be sent to a new process: {format_first_line(summarize_error(error))}"
        why = "a job that is a value is sent with all objects that its functions use"
        raise PlaitError(Problem("U021", what, why=why, fix=FIXES)) from error


def run_in_fresh_process(program: str, request: bytes, on_message: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Have a new process run a line of Python, which calls `serve`, and return its answer. `on_message` gets its messages.

    It receives this process's requests to stop, and ends with it. Raises U022 if it ends without an answer, else the error that it raised.
    """
    words = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}"]
    pipe = subprocess.PIPE
    answer: dict[str, Any] = {}
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, start_new_session=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            with _relay_signals(process):
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(request)
                    process.stdin.close()
                for line in process.stdout:
                    message = _parse_message(line.decode("utf-8", "replace"))
                    if message["kind"] in ("answer", "failed", "interrupted"):
                        answer = message
                    else:
                        on_message(message)
        except BaseException:
            process.kill()
            raise
    if answer.get("kind") == "answer":
        return answer["value"]
    if answer.get("kind") == "interrupted":
        raise KeyboardInterrupt
    if answer.get("kind") == "failed":
        raise PlaitError(map(parse_problem, answer["problems"]), answer["exit_code"], answer["trace"])
    what = f"the new process ended without an answer (exit status {process.returncode})"
    raise PlaitError(Problem("U022", what, why="its last lines, above, may have the reason"), FAILED)


def _parse_message(line: str) -> dict[str, Any]:
    """Parse a line of output; a line that is not a message is printed text."""
    if line.startswith(MESSAGE_MARK):
        return json.loads(line[len(MESSAGE_MARK) :])
    return {"kind": "say", "text": line.rstrip("\n")}


@contextlib.contextmanager
def _relay_signals(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Inside, relay requests to stop to the process; a second Ctrl-C kills it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = list[int]()

    def relay(number: int, frame: object) -> None:
        if number == signal.SIGINT and number in heard:
            process.kill()
            raise KeyboardInterrupt
        heard.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, relay) for number in RELAYED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve(work: Callable[[Any], dict[str, Any]]) -> None:
    """Run the new process: read the request, do the work, and send the result."""
    die_with_parent()
    try:
        send_message({"kind": "answer", "value": work(_read_request())})
    except KeyboardInterrupt:
        send_message({"kind": "interrupted"})
    except PlaitError as error:
        problems = [vars(problem) for problem in error.problems]
        trace = error.trace or format_trace(error.__cause__)
        send_message({"kind": "failed", "problems": problems, "exit_code": error.exit_code, "trace": trace})


def send_message(message: dict[str, Any]) -> None:
    """Send a message to the requesting process."""
    sys.stdout.write(f"{MESSAGE_MARK}{json.dumps(message)}\n")
    sys.stdout.flush()


def _read_request() -> object:
    """Read this process's request. Raises U021 if it cannot be unpickled here."""
    try:
        return pickle.loads(sys.stdin.buffer.read())
    except Exception as error:
        what = f"the new process cannot load this job: {format_first_line(summarize_error(error))}"
        raise PlaitError(Problem("U021", what, fix=FIXES)) from error
