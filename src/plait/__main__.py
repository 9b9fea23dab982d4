"""``python -m plait`` is ``plait``, so that torchrun and debuggers can start it."""

import sys

from plait.cli import main

if __name__ == "__main__":
    sys.exit(main())
