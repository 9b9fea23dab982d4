"""Tests fork workers from this process, so it keeps to one thread; so do they, since threads of small tensors only wait."""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
