"""Run `plait` as ``python -m plait``, so that torchrun and debuggers can start it."""

import contextlib
import os
import sys

with contextlib.suppress(OSError):  # the working directory may have been deleted
    here = os.getcwd()
    if not sys.flags.safe_path and sys.path[:1] == [here] and here != os.path.dirname(os.path.dirname(__file__)):
        del sys.path[0]  # as for the command `plait`: a random.py in that folder must not replace Python's

from plait.cli.main import start
from plait.launch.child import end_process
from plait.launch.place import is_launched_rank

if __name__ == "__main__":
    code = start()
    if is_launched_rank():  # a plain exit may abort in gloo's threads after a correct run
        end_process(code)
    sys.exit(code)
