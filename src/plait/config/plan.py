"""The plan: how to split a job. A small frozen value; a line of text, a TOML file or JSON, the same words in all.

>>> Plan.parse("dp=2 microbatches=3").devices
2
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from plait.config.errors import PlaitError, Problem
from plait.config.plan_text import Key, as_toml, as_word, from_file, from_line

__all__ = ["AXES", "KEYS", "Key", "Plan"]

SCHEDULES = ("sequential", "gpipe", "1f1b", "interleaved", "zb", "zbv", "auto")
"""Orders of the stages' forwards and backwards, from the simplest to the search (`parallel/pipeline/schedules.py`)."""
KEYS: dict[str, Key] = {
    "pp": Key(
        "mesh",
        int,
        "pipeline stages: each process holds some of the model's units",
        wildcard=True,
        also=("pipeline", "pipeline_parallel", "pipeline_model_parallel_size", "stages"),
    ),
    "dp": Key(
        "mesh",
        int,
        "copies of the model, each on its share of the batch; * fills the processes",
        wildcard=True,
        also=("ddp", "data_parallel", "data_parallel_size", "num_gpus", "replicas", "world_size"),
    ),
    "fsdp": Key(
        "mesh",
        int,
        "processes that share one sharded copy, each on its share of the batch",
        wildcard=True,
        also=("shard", "sharding", "fully_shard", "fsdp2", "data_parallel_shard_degree"),
    ),
    "cp": Key(
        "mesh",
        int,
        "processes that compute stretches of the same sequences",
        wildcard=True,
        also=("context_parallel", "sp", "ring_attention", "context_parallel_size", "sequence"),
    ),
    "tp": Key(
        "mesh",
        int,
        "processes that compute slices of the same layers",
        wildcard=True,
        also=("mp", "tensor_parallel", "model_parallel", "tensor_model_parallel_size"),
    ),
    "ep": Key(
        "mesh",
        int,
        "processes, among those with other samples, that share out the experts",
        also=("expert_parallel", "expert_model_parallel_size", "moe"),
    ),
    "microbatches": Key(
        "step",
        int,
        "parts each share is computed in; gradients are summed once, in the last",
        also=(
            "grad_accum",
            "gradient_accumulation",
            "gradient_accumulation_steps",
            "accumulate",
            "accumulate_grad_batches",
            "num_microbatches",
            "accum",
        ),
    ),
    "schedule": Key("step", str, "order of the stages' forwards and backwards", SCHEDULES),
    "stages_per_rank": Key("step", int, "stages each process holds, for interleaved schedules"),
    "zero": Key(
        "memory",
        int,
        "what fsdp shards: 1 optimizer state, 2 and gradients, 3 and parameters",
        ("1", "2", "3"),
        also=("zero_stage", "zero_optimization", "sharding_strategy"),
    ),
    "recompute": Key(
        "memory",
        str,
        "activations computed again in backward instead of kept",
        ("none", "selective", "full"),
        also=("activation_checkpointing", "gradient_checkpointing", "checkpointing", "checkpoint", "remat", "ac"),
    ),
    "offload": Key(
        "memory",
        str,
        "what is kept in host memory",
        ("none", "optimizer", "all"),
        also=("cpu_offload", "offload_optimizer", "offload_param"),
    ),
    "precision": Key(
        "compute",
        str,
        "number format of the forward pass",
        ("fp32", "bf16", "fp16"),
        also=("dtype", "mixed_precision", "amp", "autocast", "param_dtype", "bf16", "fp16"),
    ),
    "compile": Key("compute", bool, "torch.compile the model", also=("torch_compile", "jit", "inductor")),
    "processes": Key(
        "compute", str, "per-device, or one: the classic DataParallel with threads", ("per-device", "one")
    ),
    "sequence_parallel": Key("split", bool, "tp computes norms and dropout between its slices on stretches too"),
    "context": Key(
        "split",
        str,
        "how attention sees the other stretches under cp",
        ("ring", "ulysses"),
        also=("cp_method", "context_parallel_rotate_method", "attention"),
    ),
}

AXES = tuple(name for name, key in KEYS.items() if key.wildcard)
"""The axes of the mesh, from the slowest link to the fastest: ranks that differ in the last axis are neighbours.

`ep` is no axis of its own: it groups neighbouring ranks that have other samples.
"""


@dataclass(frozen=True)
class Plan:
    """How to split a job. A mesh axis is 0 while it is the wildcard ``*`` (see `fill`)."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    zero: int = 3
    recompute: str = "none"
    offload: str = "none"
    precision: str = "fp32"
    compile: bool = False
    processes: str = "per-device"
    sequence_parallel: bool = True
    context: str = "ring"

    def __post_init__(self) -> None:
        if self.ep > 1 and self.dp == self.fsdp == 1:  # given alone, the ranks that share out experts are the copies
            object.__setattr__(self, "dp", self.ep)

    @property
    def devices(self) -> int:
        """Devices the plan computes on."""
        return self.pp * self.shares * self.cp * self.tp

    @property
    def shares(self) -> int:
        """Between how many devices the samples of a batch are shared out."""
        return self.dp * self.fsdp

    @property
    def expert_shards(self) -> int:
        """Ranks of an `fsdp` group that hold the same experts, and so shard them: those that `ep` leaves over.

        >>> Plan.parse("fsdp=4 ep=2").expert_shards
        2
        """
        return self.fsdp // math.gcd(self.fsdp, self.ep)

    @property
    def across(self) -> bool:
        """Whether there is more than copies and shards: stages, slices, stretches or experts, so that ranks differ."""
        return self.devices > self.shares or self.ep > 1

    @property
    def world(self) -> int:
        """Processes the plan runs in."""
        return 1 if self.processes == "one" else self.devices

    @property
    def ranks(self) -> int:
        """Data-parallel processes: between how many the samples of a batch are shared out."""
        return 1 if self.processes == "one" else self.shares

    def at(self, rank: int) -> dict[str, int]:
        """The place of a rank on every axis.

        >>> Plan.parse("dp=2 tp=2").at(1)
        {'pp': 0, 'dp': 0, 'fsdp': 0, 'cp': 0, 'tp': 1}
        """
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in AXES}

    def share(self, rank: int) -> int:
        """Which share of a batch's samples a rank computes on; ranks of one `cp` and `tp` have the same."""
        at = self.at(rank)
        return at["dp"] * self.fsdp + at["fsdp"]

    def fill(self, nproc: int | None) -> "Plan":
        """The plan with its wildcard filled by `nproc` processes. P001 when the counts do not agree."""
        wild = next((name for name in AXES if getattr(self, name) == 0), None)
        if wild is not None:
            others = math.prod(getattr(self, name) for name in AXES if name != wild)
            filled = replace(self, **{wild: max(1, (nproc or others) // max(others, 1))})
            return filled if nproc is None else filled.fill(nproc)
        if nproc is not None and nproc != self.world:
            raise PlaitError(self._not(nproc))
        return self

    def idle(self) -> list[Problem]:
        """P030 for every key that was given and has no effect under this plan."""
        needs = {"zero": ("fsdp", self.fsdp), "schedule": ("pp", self.pp), "stages_per_rank": ("pp", self.pp)}
        needs |= {"sequence_parallel": ("tp", self.tp), "context": ("cp", self.cp)}
        found = []
        for key, (axis, size) in needs.items():
            if size == 1 and key in self.changed() and not (key == "zero" and self.offload == "all"):
                what = f"{key}={getattr(self, key)} has no effect: there is no {axis} in the plan"
                found.append(Problem("P030", what, why=f"{axis}=1", fix=(f"{axis}=2", f"leave out {key}")))
        return found

    def _not(self, nproc: int) -> Problem:
        """P001: the plan does not make `nproc` processes. Proposes another size of the first axis that can have one."""
        used = " × ".join(f"{name}={getattr(self, name)}" for name in AXES if getattr(self, name) > 1) or "dp=1"
        how = "threads of processes=one" if self.processes == "one" else used
        fix = [f"--nproc {self.world}"]
        for name in sorted(AXES, key=lambda axis: (getattr(self, axis) == 1, axis == "pp")):
            others = self.devices // getattr(self, name)
            if nproc % others == 0:
                changed = replace(self, processes="per-device", **{name: nproc // others})
                fix += [f'--plan "{changed}"', f'--plan "{replace(changed, **{name: 0})}"  (fills the rest)']
                break
        what = f"the plan needs {_processes(self.world)}, {_processes(nproc)} were asked for"
        return Problem("P001", what, why=f"{how} = {_processes(self.world)}", fix=tuple(fix))

    @staticmethod
    def parse(text: str) -> "Plan":
        """A plan from one line of ``key=value`` words. All faults are raised together."""
        return Plan(**from_line(text, KEYS))

    @staticmethod
    def load(path: str | Path) -> "Plan":
        """A plan from a TOML file (or JSON when the name ends in .json), with the tables of `KEYS`."""
        return Plan(**from_file(Path(path), KEYS))

    @staticmethod
    def read(text: str) -> "Plan":
        """What ``--plan`` takes: a file when it names one, else a line."""
        if "=" not in text and text.strip():
            return Plan.load(text)
        return Plan.parse(text)

    def changed(self) -> dict[str, Any]:
        """The keys that differ from the default, in the order of `KEYS`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def __str__(self) -> str:
        return " ".join(f"{k}={as_word(KEYS[k], v)}" for k, v in self.changed().items()) or "dp=1"

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values; `Plan.load` reads them back to an equal plan."""
        return {k: "*" if KEYS[k].wildcard and v == 0 else v for k, v in asdict(self).items()}

    def to_toml(self) -> str:
        """The plan as a TOML file; `Plan.load` reads it back to an equal plan."""
        return as_toml(asdict(self), KEYS)


def _processes(n: int) -> str:
    return "1 process" if n == 1 else f"{n} processes"
