"""`plait prove` on other people's scripts: six trainers, correct and wrong, and commands that cannot be compared."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from plait.scripts.commands import ScriptCommand, run_commands

SCRIPTS = Path(__file__).parents[1] / "scripts"
ONE, TWO = f"{sys.executable} ", f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 "
FOUR = TWO.replace("2 ", "4 ")
RIGHT = {
    "ddp": (f"{ONE}ddp.py", f"{TWO}ddp.py --batch-size 8"),
    "ddp, accumulation": (f"{ONE}ddp.py", f"{TWO}ddp.py --batch-size 4 --accumulation 2"),
    "by hand": (f"{ONE}ddp.py", f"{TWO}ddp.py --batch-size 8 --by-hand"),
    "ddp, augmented rows": (f"{ONE}ddp.py --augment", f"{TWO}ddp.py --batch-size 8 --augment"),
    "fsdp2": (f"{ONE}fsdp2.py", f"{TWO}fsdp2.py --batch-size 8"),
    "fsdp2, accumulation": (f"{ONE}fsdp2.py", f"{TWO}fsdp2.py --batch-size 4 --accumulation 2"),
    "fsdp2, compiled, workers": (f"{ONE}fsdp2.py", f"{TWO}fsdp2.py --batch-size 8 --compile --workers 2"),
    "fsdp2, bf16": (f"{ONE}fsdp2.py --bf16", f"{TWO}fsdp2.py --batch-size 8 --bf16"),
    "fsdp2, hybrid": (f"{ONE}fsdp2.py", f"{FOUR}fsdp2.py --batch-size 4 --hybrid"),
    "accelerate, accumulation": (f"{ONE}accelerated.py", f"{TWO}accelerated.py --batch-size 4 --accumulation 2"),
    "accelerate, dispatched": (f"{ONE}accelerated.py", f"{TWO}accelerated.py --batch-size 8 --dispatch"),
    "trainer": (f"{ONE}trained.py", f"{TWO}trained.py --batch-size 8"),
    "trainer, accumulation, workers": (f"{ONE}trained.py", f"{TWO}trained.py --batch-size 4 --accumulation 2 --workers 1"),
    "lightning": (f"{ONE}lightened.py", f"{ONE}lightened.py --batch-size 8 --devices 2"),
    "lightning, accumulation": (f"{ONE}lightened.py", f"{ONE}lightened.py --batch-size 4 --devices 2 --accumulation 2"),
    "dtensor": (f"{ONE}sliced.py", f"{TWO}sliced.py"),
    "dtensor and fsdp2": (f"{ONE}sliced.py", f"{FOUR}sliced.py --batch-size 8 --data 2"),
    "stream": (f"{ONE}streamed.py", f"{TWO}streamed.py --batch-size 8"),
    "no loader": (f"{ONE}streamed.py --bare", f"{TWO}streamed.py --batch-size 8 --bare"),
    "no loader, keywords": (f"{ONE}streamed.py --bare --keywords", f"{TWO}streamed.py --batch-size 8 --bare --keywords"),
    "two optimizers, spawned": (f"{ONE}streamed.py --gan", f"{ONE}streamed.py --batch-size 8 --gan --spawn 2"),
}
"""Pairs that train the same model."""
WRONG = {
    "ddp, no sampler": (f"{ONE}ddp.py", f"{TWO}ddp.py --batch-size 8 --wrong no-sampler", "E022"),
    "ddp, no set_epoch": (f"{ONE}ddp.py", f"{TWO}ddp.py --batch-size 8 --wrong no-epoch", "E023"),
    "ddp, batch norm": (f"{ONE}ddp.py --wrong batch-norm", f"{TWO}ddp.py --batch-size 8 --wrong batch-norm", "E035"),
    "ddp, accumulation": (f"{ONE}ddp.py", f"{TWO}ddp.py --batch-size 4 --accumulation 2 --wrong accumulation", "E031"),
    "ddp, tokens": (f"{ONE}ddp.py --labels-left-out", f"{TWO}ddp.py --batch-size 8 --labels-left-out", "E030"),
    "by hand, left out": (f"{ONE}ddp.py", f"{TWO}ddp.py --batch-size 8 --wrong by-hand-left-out", "E034"),
    "by hand, other seed": (f"{ONE}ddp.py", f"{TWO}ddp.py --batch-size 8 --wrong other-seed", "E026"),
    "ddp, no process group": (f"{ONE}ddp.py", f"{TWO}ddp.py --batch-size 8 --wrong no-group", "E021"),
    "ddp, own shuffles": (f"{ONE}ddp.py", f"{TWO}ddp.py --batch-size 8 --wrong seeded-shuffle", "E024"),
    "ddp, weight decay by name": (f"{ONE}ddp.py --wrong decay", f"{TWO}ddp.py --batch-size 8 --wrong decay", "E028"),
    "ddp, a parameter left out": (f"{ONE}ddp.py", f"{TWO}ddp.py --batch-size 8 --wrong left-out", "E029"),
    "one process": (f"{ONE}ddp.py", f"{ONE}ddp.py --batch-size 8", "E021"),
    "fsdp2, clips shards": (f"{ONE}fsdp2.py", f"{TWO}fsdp2.py --batch-size 8 --wrong clips-shards", "E033"),
    "fsdp2, scheduler": (f"{ONE}fsdp2.py", f"{TWO}fsdp2.py --batch-size 8 --wrong scheduler", "E027"),
    "fsdp2, no sampler": (f"{ONE}fsdp2.py", f"{TWO}fsdp2.py --batch-size 8 --wrong no-sampler", "E022"),
    "fsdp2, times ranks": (f"{ONE}fsdp2.py", f"{TWO}fsdp2.py --batch-size 8 --wrong times-ranks", "E031"),
    "fsdp2, never summed": (f"{ONE}fsdp2.py", f"{TWO}fsdp2.py --batch-size 4 --accumulation 2 --wrong never-summed", "E029"),
    "accelerate, accumulation": (f"{ONE}accelerated.py", f"{TWO}accelerated.py --batch-size 4 --accumulation 2 --wrong accumulation", "E031"),
    "accelerate, tokens": (f"{ONE}accelerated.py --tokens", f"{TWO}accelerated.py --batch-size 8 --tokens", "E030"),
    "accelerate, scheduler": (f"{ONE}accelerated.py --wrong scheduler", f"{TWO}accelerated.py --batch-size 8 --wrong scheduler", "E027"),
    "accelerate, times ranks": (f"{ONE}accelerated.py", f"{TWO}accelerated.py --batch-size 8 --wrong times-ranks", "E031"),
    "trainer, own mean": (f"{ONE}trained.py --wrong own-mean", f"{TWO}trained.py --batch-size 8 --wrong own-mean", "E030"),
    "trainer, tokens of ranks": (f"{ONE}trained.py", f"{TWO}trained.py --batch-size 8 --wrong tokens-of-ranks", "E030"),
    "trainer, times ranks": (f"{ONE}trained.py --wrong own-mean", f"{TWO}trained.py --batch-size 8 --wrong times-ranks", None),
    "lightning, batch norm": (f"{ONE}lightened.py --wrong batch-norm", f"{ONE}lightened.py --batch-size 8 --devices 2 --wrong batch-norm", "E035"),
    "lightning, times ranks": (f"{ONE}lightened.py", f"{ONE}lightened.py --batch-size 8 --devices 2 --wrong times-ranks", "E031"),
    "lightning, no sampler": (f"{ONE}lightened.py", f"{ONE}lightened.py --batch-size 8 --devices 2 --wrong no-sampler", "E022"),
    "lightning, tokens": (f"{ONE}lightened.py --wrong tokens", f"{ONE}lightened.py --batch-size 8 --devices 2 --wrong tokens", "E030"),
    "dtensor, other rows": (f"{ONE}sliced.py", f"{TWO}sliced.py --wrong other-rows", "E036"),
    "dtensor, sums twice": (f"{ONE}sliced.py", f"{TWO}sliced.py --wrong sums-twice", "E032"),
    "dtensor and fsdp2, no sampler": (f"{ONE}sliced.py", f"{FOUR}sliced.py --batch-size 8 --data 2 --wrong no-sampler", "E022"),
    "dtensor, clips shards": (f"{ONE}sliced.py", f"{TWO}sliced.py --wrong clips-shards", "E033"),
    "stream, all read all": (f"{ONE}streamed.py", f"{TWO}streamed.py --batch-size 8 --wrong all", "E022"),
    "keywords, all read all": (f"{ONE}streamed.py --bare --keywords", f"{TWO}streamed.py --batch-size 8 --bare --keywords --wrong all", "E022"),
}
"""Pairs of which the second trains another model, and the cause. None: any cause of a wrong script, because it has two mistakes at once."""
MENDED = {
    "ddp, no sampler": ("DDP, FSDP2: DataLoader(..., sampler=DistributedSampler(dataset))", '"no-sampler", "seeded-shuffle")', '"seeded-shuffle",)'),
    "ddp, no set_epoch": ("call sampler.set_epoch(epoch)", ' and given.wrong != "no-epoch"', ""),
    "ddp, batch norm": ("a norm that does not couple rows (LayerNorm, GroupNorm)", "nn.BatchNorm1d(24)", "nn.GroupNorm(4, 24)"),
    "ddp, accumulation": ("(loss / accumulation_steps).backward()", 'loss if given.wrong == "accumulation" else loss /', "loss /"),
    "ddp, tokens": (
        'DDP, FSDP2: loss = F.cross_entropy(..., reduction="sum") * ranks / tokens',
        "loss = F.cross_entropy(wrapped(x), y)",
        "tokens = (y != -100).sum()\n        dist.is_initialized() and dist.all_reduce(tokens)\n"
        '        loss = F.cross_entropy(wrapped(x), y, reduction="sum") * ranks / tokens',
    ),
    "by hand, left out": ("all_reduce every parameter's gradient", 'given.wrong == "by-hand-left-out" and k == 0', "False"),
    "by hand, other seed": ("call torch.manual_seed with the same seed on all ranks", 'rank if given.wrong == "other-seed" else 0', "0"),
    "ddp, no process group": ("several ran: call torch.distributed.init_process_group()", ' and given.wrong != "no-group"', ""),
    "ddp, own shuffles": ("DataLoader(..., sampler=DistributedSampler(dataset))", '"no-sampler", "seeded-shuffle")', '"no-sampler",)'),
    "ddp, weight decay by name": ("select groups by name before wrapping the model", "wrapped.named_parameters()", "model.named_parameters()"),
    "ddp, a parameter left out": ("create the optimizer from all parameters", '[: -1 if given.wrong == "left-out" else None]', ""),
    "fsdp2, clips shards": ("torch.nn.utils.clip_grad_norm_(model.parameters(), ...)", "        clip(", "        nn.utils.clip_grad_norm_("),
    "fsdp2, scheduler": ("once for each optimizer step", 'range(ranks if given.wrong == "scheduler" else 1)', "range(1)"),
    "fsdp2, times ranks": ("neither multiply the loss by the number of ranks", 'loss * ranks if given.wrong == "times-ranks" else loss', "loss"),
    "fsdp2, never summed": ("model.set_requires_gradient_sync(True) before the last", ' and given.wrong != "never-summed"', ""),
    "accelerate, accumulation": ("(loss / accumulation_steps).backward()", "else loss)", "else loss / given.accumulation)"),
    "accelerate, tokens": (
        "Accelerate, Lightning: the same, times the accumulation steps",
        "loss = F.cross_entropy(model(x), y)",
        'loss = F.cross_entropy(model(x), y, reduction="sum") * accelerator.num_processes / accelerator.reduce((y != -100).sum())\n'
        "            loss = loss * accelerator.gradient_accumulation_steps",
    ),
    "accelerate, scheduler": ("multiply its numbers of steps by the processes", "T_max=12", "T_max=12 * accelerator.num_processes"),
    "accelerate, times ranks": ("neither multiply the loss by the number of ranks", "loss * accelerator.num_processes if", "loss if"),
    "trainer, own mean": ("Trainer: let the model compute its loss (num_items_in_batch)", "Own(model", "Trainer(model"),
    "trainer, tokens of ranks": ("average_tokens_across_devices=True", 'devices=given.wrong != "tokens-of-ranks"', "devices=True"),
    "lightning, batch norm": ("a norm that does not couple rows (LayerNorm, GroupNorm)", "nn.BatchNorm1d(16)", "nn.LayerNorm(16)"),
    "lightning, times ranks": ("neither multiply the loss by the number of ranks", "loss * self.trainer.world_size if", "loss if"),
    "lightning, no sampler": ("Lightning: Trainer(use_distributed_sampler=True)", 'sampler=given.wrong != "no-sampler"', "sampler=True"),
    "lightning, tokens": (
        "Accelerate, Lightning: the same",
        "loss = F.cross_entropy(self.layers(batch[0]), batch[1])\n        if",
        'tokens = self.trainer.strategy.reduce((batch[1] != -100).sum(), reduce_op="sum")\n'
        '        loss = F.cross_entropy(self.layers(batch[0]), batch[1], reduction="sum") * self.trainer.world_size / tokens\n        if',
    ),
    "dtensor, other rows": ("DistributedSampler(dataset, num_replicas=DP", "= dist.get_rank() if ranks > 1 else 0, ranks", "= replica, replicas"),
    "dtensor, sums twice": ("DTensor sum in backward: leave out sums by hand", 'given.wrong == "sums-twice" and ranks > 1', "False"),
    "dtensor and fsdp2, no sampler": ("with tensor parallelism: DistributedSampler(dataset, num_replicas=DP", ' and given.wrong != "no-sampler"', ""),
    "stream, all read all": ("an IterableDataset, or no DataLoader: rank r of n", "(0, 1) if given.wrong else (rank, ranks)", "(rank, ranks)"),
}
"""A fix that is printed for a wrong script, the text that it replaces in the script, and the replacement."""
UNCLEAR = {
    "no command": (f"{ONE}ddp.py", "no-such-command", "E001"),
    "fails": (f"{ONE}ddp.py", f"{ONE}ddp.py --no-such-option", "E001"),
    "isolated": (f"{ONE}ddp.py", f"{sys.executable} -I ddp.py", "E002"),
    "no Python": (f"{ONE}ddp.py", "true", "E002"),
    "never steps": (f"{ONE}ddp.py", f"{ONE}-c 'import torch'", "E003"),
    "never ends": (f"{ONE}ddp.py", f"{ONE}-c 'import torch, time; print(5 * 2**20 * \"x\"); time.sleep(9999)'", "E003"),
    "a rank steps less often": (f"{ONE}fsdp2.py", f"{TWO}fsdp2.py --batch-size 8 --wrong short-rank", "E004"),
    "the reference accumulates": (f"{ONE}ddp.py --batch-size 8 --accumulation 2", f"{TWO}ddp.py --batch-size 8", "E010"),
    "noise": (f"{ONE}ddp.py --noise", f"{TWO}ddp.py --batch-size 8 --noise", "E008"),
}
"""Pairs without a verdict, and the reason."""
long = pytest.mark.prove


def proved(reference: str, candidate: str, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the result of `plait prove` on two commands. Scripts are searched in the folder, then here."""
    found = lambda word: str(next(path for place in (folder, SCRIPTS) if (path := place / word).exists())) if word.endswith(".py") else word  # noqa: E731
    words = [shlex.join(map(found, shlex.split(each))) for each in (reference, candidate)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "plait", "prove", "--json", *options, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


@long
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_is_the_same(name: str, tmp_path: Path) -> None:
    code, told = proved(*RIGHT[name], tmp_path)
    assert (code, told["verdict"]) == (0, "SAME"), told


@long
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_script_differs_by_its_cause_and_is_mended_by_its_advice(name: str, tmp_path: Path) -> None:
    reference, candidate, cause = WRONG[name]
    code, told = proved(reference, candidate, tmp_path)
    assert (code, told["verdict"]) == (3, "DIFFERENT"), told
    assert cause is None or told["cause"]["code"] == cause, told["cause"]
    if name in MENDED:
        fix, old, new = MENDED[name]
        assert any(fix in line for problem in told["problems"] for line in problem["fix"]), told["problems"]
        script = next(SCRIPTS / word for word in candidate.split() if word.endswith(".py"))
        assert script.read_text().count(old) == 1
        (tmp_path / script.name).write_text(script.read_text().replace(old, new))
        code, told = proved(reference, candidate, tmp_path)
        assert (code, told["verdict"]) == (0, "SAME"), told


@long
@pytest.mark.parametrize("name", UNCLEAR)
def test_what_cannot_be_told_is_said(name: str, tmp_path: Path) -> None:
    reference, candidate, cause = UNCLEAR[name]
    code, told = proved(reference, candidate, tmp_path, "--hang-timeout", "45")
    assert (code, told["verdict"]) == (2, "CANNOT TELL"), told
    assert told["errors"][0]["code"] == cause, told
    assert not [each for each in psutil.process_iter(["cwd"]) if each.info["cwd"] == str(tmp_path)]


@long
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "accelerated", "trained", "lightened", "sliced"])
def test_a_recorder_changes_no_loss(name: str, tmp_path: Path) -> None:
    command = f"{ONE}{SCRIPTS / name}.py --batch-size 8 --devices 2" if name == "lightened" else f"{TWO}{SCRIPTS / name}.py --batch-size 8"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(shlex.split(f"{command} --losses {tmp_path}/without"), check=True, cwd=tmp_path, env=environment, capture_output=True)
    watched = ScriptCommand("candidate", f"{command} --losses {tmp_path}/with", 6, 600.0, 1 << 30, watch=True)
    assert run_commands({tmp_path / "recorded" / name: watched}, lambda side, done, total: None)[0]
    without, with_recorder = ((tmp_path / each).read_text() for each in ("without", "with"))
    assert without == with_recorder and len(without.splitlines()) >= 12


@long
def test_a_mistake_that_bf16_hides_is_seen_in_float64(tmp_path: Path) -> None:
    pair = (f"{ONE}ddp.py --labels-left-out", f"{TWO}ddp.py --batch-size 8 --labels-left-out")
    code, told = proved(*pair, tmp_path, "--float64")
    assert (code, told["cause"]["code"]) == (3, "E030")
    code, told = proved(f"{ONE}fsdp2.py --bf16", f"{TWO}fsdp2.py --batch-size 8 --bf16", tmp_path, "--float64")
    assert (code, told["verdict"]) == (0, "SAME"), told
    assert told["probes"]["G"]["worst"] < 1e-9


@pytest.mark.slow
def test_room_on_disk_is_bounded(tmp_path: Path) -> None:
    code, told = proved(f"{ONE}ddp.py", f"{ONE}ddp.py", tmp_path, "--disk-limit", "0.000001")
    assert (code, told["errors"][0]["code"]) == (2, "E011"), told
