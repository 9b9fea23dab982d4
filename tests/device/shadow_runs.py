"""A process with simulated devices, which runs cases; `test_shadow.py` starts it.

    python -m device.shadow_runs LIBRARY      a case in JSON on each line of its input; its result, on a line of its output
"""

import os
import sys
from pathlib import Path

from device import shadow

DEVICES = 4

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    shadow.load(Path(sys.argv[1]), DEVICES)
    from device import shadow_cases

    shadow_cases.main()
