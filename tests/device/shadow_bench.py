"""A process with one simulated device, on which it runs the parts of `bench/gpu.py`; `test_shadow_bench.py` starts it.

python -m device.shadow_bench LIBRARY FOLDER PART/LOOK …      the row of each look in JSON, on a line of its output
"""

import json
import os
import sys
from pathlib import Path

from device import shadow

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    shadow.load(Path(sys.argv[1]), 1)
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    import gpu
    import gpu_looks
    import torch

    from device import attention_kernels
    from plait.proof import full_batch

    full_batch.DEFAULT_SECONDS = 0.0
    attention_kernels.install()
    torch.set_num_threads(1)
    setting = gpu_looks.Setting("cuda", Path(sys.argv[2]), 0.02)
    for words in sys.argv[3:]:
        part, _, name = words.partition("/")
        print(json.dumps(gpu_looks.look(gpu.PARTS[part].looks(setting)[name], setting.out, 200.0)), flush=True)
