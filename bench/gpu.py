"""Runs the first hour on a GPU, in parts that can be run separately: does plait compute correctly there, how fast, and as predicted?

    python bench/gpu.py                                  all parts; on a machine without a GPU, as --device cpu
    python bench/gpu.py --minutes 5                      starts no check after 5 minutes; the same call resumes there
    python bench/gpu.py --parts verify,kernels           some parts; --again repeats finished checks
    python bench/gpu.py --device cpu                     tiny sizes: tests this script; its speeds are meaningless

Each part is a file in --out (build/gpu): PART.json, with a row for each check. A check runs in its own process, and a failure
is a row with its traceback. At the end all rows are printed as tables, and saved as table.md and all.json. The exit code is 1
if a check has failed.

    environment      versions, driver, clocks, peaks; CUDA is not started before ranks are forked
    verify           `plait verify` of every strategy that one device allows
    one_rank         NCCL with one rank: collectives, buckets, batch normalization; the loss decreases in every format
    two_ranks        `plait verify` of two ranks on one device: dp, fsdp, tp, pp, cp, ep (see gpu_carried.py)
    kernels          keyed masks, attention kernels of a ring, fused optimizers (gpu_kernels.py)
    waits            host synchronizations of a step, with their lines (gpu_steps.py)
    prediction       time and memory by category, predicted and measured (gpu_speed.py)
    speed            tokens/s and MFU against a hand-written loop, with and without compile and dropout (gpu_speed.py)
    trace            activity of the device in a step; a trace of the profiler is saved (gpu_steps.py)
"""

import argparse
import sys

import gpu_checks
import gpu_kernels
import gpu_looks
import gpu_speed
import gpu_steps
from gpu_looks import Part

PARTS = {
    "environment": Part("environment", gpu_checks.environment),
    "verify": Part("`plait verify` on one device, in float64", gpu_checks.one_device),
    "one_rank": Part("a process group of one rank, and 20 steps by format", gpu_checks.one_rank),
    "two_ranks": Part("`plait verify` of two ranks on one device, in float64", gpu_checks.two_ranks),
    "kernels": Part("kernels", gpu_kernels.looks),
    "waits": Part("host synchronisations", gpu_steps.synchronisations),
    "prediction": Part("predicted and measured", gpu_speed.predictions),
    "speed": Part("training steps of plait and of a hand-written loop", gpu_speed.looks),
    "trace": Part("what the device does in a step", gpu_steps.traces),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpu_looks.options(parser, "build/gpu")
    sys.exit(gpu_looks.main(parser, PARTS))
