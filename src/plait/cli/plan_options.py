"""The options of `plait plan`. Nothing here imports torch."""

import argparse
from pathlib import Path


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add them to a parser."""
    add = parser.add_argument
    add(
        "--machine", default="here",
        help="what to train on: here, a name such as h100x8 or h100x8x16 (16 nodes of 8), or a TOML file (here)",
    )  # fmt: skip
    add("--gpus", type=int, metavar="N", help="so many devices of the machine, instead of all")
    add("--batch", type=int, help="global batch, instead of the job's")
    add("--memory", metavar="SIZE", help="memory of a device, such as 80GiB, instead of the machine's")
    add("--plan", help="keys that are given, as one line; with --show or --dry-run the plan to look at")
    add("--pin", action="append", default=[], metavar="KEY=VALUE", help="the same, one key at a time")
    add("--top", type=int, default=5, metavar="N", help="how many of the best plans to show (5)")
    add("--all", action="store_true", help="show the best plan of every mesh, and what does not fit")
    add("--out", type=Path, metavar="FILE", help="write the choice there, as a plan file")
    add(
        "--objective", choices=("fastest", "cheapest", "fewest", "largest"), default="fastest",
        help="fastest step; cheapest or fewest devices; largest batch that fits (fastest)",
    )  # fmt: skip
    add("--vary", metavar="NAME", help="largest: not the batch but this argument of the job, such as length")
    add("--deadline", metavar="TIME", help="the whole job must end within it, such as 24h (fewest)")
    add("--scale", metavar="N,N,…", help="the best plan at each number of devices, and its efficiency")
    add("--try", type=int, default=0, dest="tries", metavar="K", help="run the first K for a few steps, here")
    add("--show", choices=("tensor",), help="of --plan: which layers tp cuts, how, what stays whole and why")
    add("--dry-run", action="store_true", help="make a step of --plan, of one rank of each kind, without processes")
