"""Jobs modeled on public bug reports, under plans: each equals one device, or is rejected or reported with the reason."""

import warnings
from pathlib import Path

import pytest
from rarely import seldom

from plait.config.errors import PlaitError
from plait.config.job import load_job
from plait.config.plan import Plan
from plait.proof.verify import verify

EQUAL = "EQUAL"
SPLIT = "dp=2", "fsdp=2", "tp=2"
STAGES = "pp=2 microbatches=2"
PARTS = "dp=2 microbatches=2"
CASES: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "template_attr": {
        **{f"kind={kind}": {"V015": ("dp=2",)} for kind in ("add", "put", "numpy", "legacy")},
        "kind=fresh": {"V015": ("dp=2", "microbatches=2")},
        "kind=sample": {EQUAL: ("dp=2", PARTS)},
        **{f"kind={kind}": {EQUAL: ("dp=2",)} for kind in ("list", "own")},
    },
    "param_hooks": {
        "kind=rows": {EQUAL: (*SPLIT, PARTS)},
        "kind=scale": {EQUAL: (*SPLIT, PARTS)},
        "kind=prune": {EQUAL: SPLIT},
    },
    "param_attributes": {"": {EQUAL: (*SPLIT, STAGES)}},
    "unfreeze": {"": {"P094": ("dp=2", "microbatches=2")}, "clip=0": {"P094": ("dp=2",)}, "at=100": {EQUAL: ("dp=2",)}},
    "complex_rope_float": {"": {EQUAL: (*SPLIT, STAGES, "cp=2")}},
    "complex_fno": {"": {EQUAL: ("dp=2", STAGES), "P029": ("fsdp=2",), "P034": ("tp=2",)}},
    "complex_kinds": {
        **{f"kind={kind}": {EQUAL: ("dp=2", "fsdp=2", STAGES), "P034": ("tp=2",)} for kind in ("poles", "filter")},
        "kind=phases": {EQUAL: (*SPLIT, STAGES)},
    },
    "gnn": {"": {EQUAL: ("dp=2", "fsdp=2", "dp=3"), "V010": ("microbatches=2",)}, "bn=false": {EQUAL: ("dp=2",)}},
    "mixed_dtypes": {
        "kind=lora": {EQUAL: ("dp=2", "fsdp=2"), "P034": ("tp=2",)},
        "kind=double": {EQUAL: ("dp=2", STAGES)},
        "kind=bf16": {EQUAL: (*SPLIT, STAGES)},
    },
    "wrapped_models": {
        "kind=sync": {EQUAL: ("dp=2", "fsdp=2")},
        "kind=compile": {EQUAL: ("dp=2",)},
        "kind=dp": {EQUAL: ("dp=2",)},
        "kind=script": {"P071": ("dp=2", "fsdp=2")},
        "kind=last": {EQUAL: ("dp=2",)},
    },
    "python_counter": {
        "": {EQUAL: ("dp=2", "fsdp=2"), "V029": (PARTS, STAGES)},
        "fixed=true": {EQUAL: (PARTS,)},
    },
    "wav2vec2": {"": {"V015": ("dp=2",)}, "drop=0 mask=0": {EQUAL: ("dp=2",)}},
    "ctc": {"": {"V010": ("dp=2",)}, "p=0": {EQUAL: ("dp=2",)}},
    "lazy": {"kind=lazy": {"J006": ("dp=2",)}, "kind=cache": {EQUAL: ("dp=2", "fsdp=2")}, "kind=forward": {"J052": ("dp=2",)}},
    "own_moe": {"": {EQUAL: ("dp=2", "ep=2")}, "jit=0": {EQUAL: ("ep=2",)}},
    "prodigy_schedulefree": {
        "kind=prodigy": {EQUAL: ("dp=2",), "P022": ("fsdp=2",)},
        "kind=free": {EQUAL: ("dp=2",)},
    },
    "sparse_embedding": {"": {"J012": ("dp=2",)}},
    "bad_samples": {"kind=nan": {EQUAL: ("dp=2",)}, **{f"kind={kind}": {"C014": ("dp=2",)} for kind in ("raise", "index")}},
    "mamba": {"": {EQUAL: ("dp=2",), "P042": ("cp=2",)}},
    "short_texts": {
        **{f"kind={kind}": {EQUAL: ("dp=2",), code: ("cp=2",)} for kind, code in (("chat", "P042"), ("pairs", "P042"), ("answers", "P040"))},
        **{f"kind={kind}": {EQUAL: ("dp=2", "cp=2")} for kind in ("padded", "even")},
    },
}  # fmt: skip
"""By the job's file and its options: the outcome, and the plans."""
ROWS = [
    (file, options, plan, outcome)
    for file, kinds in CASES.items()
    for options, outcomes in kinds.items()
    for outcome, plans in outcomes.items()
    for plan in plans
]
QUICK = ("template_attr", "kind=fresh", "dp=2"), ("param_hooks", "kind=rows", "dp=2"), ("sparse_embedding", "", "dp=2")


def outcome_of(file: str, options: str, plan: str) -> str:
    """Returns EQUAL, or the codes of the difference or of the error."""
    path = Path(__file__).parents[1] / "reported" / f"{file}.py"
    try:
        job = load_job(str(path), dict(option.split("=", 1) for option in options.split()))
        with warnings.catch_warnings():
            if "kind=compile" in options:  # torch's compiler warns about its own internals
                warnings.simplefilter("default")
            verdict = verify(job, Plan.parse(plan))
    except PlaitError as error:
        return " ".join(error.codes)
    return EQUAL if verdict.equal and not verdict.inexact else verdict.code


@pytest.mark.parametrize("file, options, plan, outcome", [row for row in ROWS if row[:3] in QUICK])
def test_a_write_a_hook_and_a_refusal(file: str, options: str, plan: str, outcome: str) -> None:
    assert outcome_of(file, options, plan) == outcome


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("file, options, plan, outcome", seldom(5, (row for row in ROWS if row[:3] not in QUICK)))
def test_the_others(file: str, options: str, plan: str, outcome: str) -> None:
    assert outcome_of(file, options, plan) == outcome
