"""``python -m plait`` is ``plait``, so that torchrun and debuggers can start it."""

import os
import sys

from plait.cli.main import main
from plait.launch.place import joining

if __name__ == "__main__":
    code = main()
    if joining():  # a plain exit may abort in gloo's threads after a correct run
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
