"""Test jobs that reproduce bug reports of distributed trainers under three or more plans: equal, rejected, or named as inexact.

The expected verdicts were derived from the jobs. Every deviation was reviewed before it entered the table.
`python tests/exact/test_tracker_reports.py` writes docs/trackers.md.
"""

from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from rarely import seldom
from trackers import gradients, inputs, losses, models, optimizers, sharing, state

from plait.config.errors import PlaitError
from plait.config.job import Job
from plait.config.plan import Plan
from plait.engine.engine import Engine
from plait.launch import fork
from plait.launch.place import Place
from plait.launch.supervisor import Listener
from plait.proof.job import check
from plait.proof.verify import verify

PAGE = Path(__file__).parents[2] / "docs" / "trackers.md"
HEAD = """\
# Jobs that reproduce bug reports
Users of distributed trainers report jobs that trained differently, crashed or hung after they were split. Each job on this page
reproduces such a report in new code (`tests/trackers`). `tests/exact/test_tracker_reports.py` checks each row of the tables.
`plait verify` must return the listed verdict, and a short training must agree with it. For a verdict that starts with V, the check
before training must fail too. `python tests/exact/test_tracker_reports.py` writes this page.

| verdict | meaning |
|---|---|
| EQUAL | proved equal to one device; a short training has the losses of one device |
| P…, J… | rejected with this error code before training |
| V… | the plan changes the training result: `verify` shows the first difference, and the check before training fails |
| named | the plan cannot be exact for this job, and the run names the operation |
"""
DP, FSDP, TP, PP, CP = "dp=2", "fsdp=2", "tp=2", "pp=2 microbatches=2", "cp=2"
PARTS, SHARDED, AGAIN, STAGES = "dp=2 microbatches=2", "dp=2 fsdp=2", "fsdp=2 activation_checkpointing=full", "pp=2"
E = "EQUAL"
ROWS: dict[ModuleType, dict[str, dict[str, str]]] = {
    sharing: {
        "tied_later": {DP: E, FSDP: E, PP: E, TP: E},
        "unused_head": {DP: E, FSDP: E, PP: E},
        "recursive_checkpoint": {DP: E, AGAIN: E, PP: E},
        "chosen_and_rejected": {PARTS: E, FSDP: E, TP: E},
        "siamese": {PARTS: E, FSDP: E, PP: E},
        "transposed_decoder": {DP: E, FSDP: E, PP: E},
        "hypernetwork": {DP: E, FSDP: E, PARTS: E},
        "parametrized": {DP: E, FSDP: E, TP: "P034"},
        "parameters_by_task": {DP: E, FSDP: E, PARTS: E},
    },
    losses: {
        "smoothed_tokens": {PARTS: E, FSDP: E, TP: E},
        "smoothed_tokens_unweighted": {PARTS: "V013", FSDP: "V013", TP: E},
        "class_weights": {DP: E, AGAIN: E, PARTS: E},
        "class_weights_by_samples": {DP: "V013", FSDP: "V013", TP: E},
        "contrastive": {DP: E, FSDP: E, PARTS: "named"},
        "contrastive_by_rank": {DP: "V013", FSDP: "V013", TP: E},
        "triplets": {DP: "V013", PP: "V013", TP: E},
        "missing_labels": {DP: E, FSDP: E, PP: E},
        "missing_labels_by_task": {DP: "V013", FSDP: "V013", TP: E},
        "uncertainty_weights": {DP: E, FSDP: E, PP: E},
        "correlation": {DP: "V013", PARTS: "V013", STAGES: E},
        "summed": {DP: "V013", FSDP: "V013", TP: E},
        "branch_on_loss": {DP: "V013", PP: "V013", STAGES: E},
        "random_field": {DP: E, AGAIN: E, PARTS: E},
    },
    state: {
        "growing_tables": {DP: E, AGAIN: E, PP: "named"},
        "cached_keys": {DP: E, AGAIN: E, PP: E},
        "codebook": {DP: "named", FSDP: "named", TP: E},
        "codebook_of_all": {DP: E, FSDP: E, PARTS: "named"},
        "queue_of_keys": {DP: E, FSDP: E, PARTS: "named"},
        "learned_codebook": {DP: E, FSDP: E, PP: E},
        "bootstrap": {DP: E, FSDP: "P031", TP: "P034"},
        "first_batch_norm": {DP: "P031", FSDP: "P031", TP: E},
        "first_batch_norm_of_all": {DP: E, FSDP: "P031", STAGES: E},
        "embedding_max_norm": {DP: "P031", FSDP: "P031", TP: E},
        "embedding_by_frequency": {DP: "V018", FSDP: "V018", STAGES: E},
        "metric_in_model": {DP: "named", FSDP: "named", STAGES: "P024"},
        "checkpointed_batch_norm": {DP: E, FSDP: E, PARTS: "named"},
        "clamped_scale": {DP: E, FSDP: "P031", TP: E},
    },
    gradients: {
        "backward_hooks": {DP: E, FSDP: E, PP: E},
        "learned_step_size": {DP: E, FSDP: E, TP: "P034"},
        "fake_quantized": {DP: E, FSDP: E, TP: "P034"},
        "quantized_activations": {DP: "V015", FSDP: "V015", STAGES: E},
        "jacobian_penalty": {DP: E, FSDP: E, PARTS: E},
        "stopped_gradient": {DP: E, FSDP: E, PARTS: "named"},
        "random_slopes": {DP: "named", AGAIN: "named", STAGES: "named"},
        "learned_prompt": {DP: E, FSDP: E, CP: E},
    },
    models: {
        "vmapped_ensemble": {DP: E, FSDP: E, PARTS: E},
        "spectral_filter": {DP: E, FSDP: E, PP: E},
        "equilibrium": {DP: "V015", FSDP: "V015", TP: "P034"},
        "coupling_flow": {DP: E, AGAIN: E, PP: E},
        "neural_ode": {DP: E, FSDP: E, TP: E},
        "masked_autoencoder": {DP: E, FSDP: E, PP: E},
        "antithetic_times": {DP: "named", FSDP: "named", STAGES: "named"},
        "expert_choice": {DP: "V015", FSDP: "V015", "activation_checkpointing=full microbatches=2": "V015"},
        "least_squares_gan": {DP: E, FSDP: E, SHARDED: E},
        "one_key_head": {FSDP: E, PP: E, TP: E},
        "fused_by_head": {FSDP: E, TP: E, CP: E},
    },
    inputs: {
        "dataclass_batches": {DP: E, FSDP: E, PARTS: E},
        "shuffled_stream": {DP: E, FSDP: E, PP: E},
        "token_buckets": {DP: E, FSDP: E, PARTS: E},
        "cut_and_mixed": {DP: E, AGAIN: E, PARTS: E},
        "padded_images": {DP: E, FSDP: E, TP: E},
    },
    optimizers: {
        "lookahead": {DP: E, FSDP: E, TP: E},
        "rates_by_width": {DP: E, FSDP: E, TP: E},
        "unit_clipping": {DP: E, FSDP: E, TP: E},
        "groups_by_rank_of_tensor": {DP: E, FSDP: E, PP: E},
    },
}  # fmt: skip
"""Expected verdict by job and plan: EQUAL, the code of a rejection, "named" for an inexact operation (with any values), or the code of a
difference, which the check before training must find too."""


def job(module: ModuleType, name: str) -> Job:
    return getattr(module, name)()


@cache
def trained(module: ModuleType, name: str, plan: str) -> tuple[list[float], list[str]]:
    """The losses of three steps in the job's own formats, and the operations that the engine names as not exact. Errors are raised."""

    def run(place: Place) -> tuple[list[float], list[str]]:
        engine = Engine(job(module, name), plan, device="cpu", place=place)
        return [engine.step(batch).loss for batch, _ in zip(engine.batches(), range(3))], [*engine.inexact]

    return fork.run_ranks(run, Plan.parse(plan).world, Listener(on_note=lambda text: None))[0]


def of_verify(module: ModuleType, name: str, plan: str) -> tuple[str, str]:
    """The result of `verify` in the table's format, and its text."""
    try:
        verdict = verify(job(module, name), Plan.parse(plan), device="cpu")
    except PlaitError as error:
        return error.problems[0].code, str(error)
    if verdict.inexact:
        return "named", f"{verdict.code} {verdict.inexact}"
    return (E if verdict.equal else verdict.code), f"{verdict.cause} {verdict.first_wrong}"


def of_training(module: ModuleType, name: str, plan: str) -> tuple[str, str]:
    """The same for a training: rejected, named as not exact, or three steps; EQUAL if these have one device's losses."""
    try:
        losses_, inexact = trained(module, name, plan)
    except PlaitError as error:
        return error.problems[0].code, str(error)
    if inexact:
        return "named", str(inexact)
    difference = max(abs(a - b) / max(1, abs(a)) for a, b in zip(trained(module, name, "dp=1")[0], losses_))
    return (E if difference < 1e-5 else "different"), f"losses differ by {difference:.1e}"


def of_check(module: ModuleType, name: str, plan: str) -> tuple[str, str]:
    """The code of the first finding of the check before training."""
    found = check.check_job(job(module, name), Plan.parse(plan))
    return (found.problems[0].code if found.problems else E), str(found.to_dict())


QUICK = (("tied_later", FSDP), ("class_weights_by_samples", DP), ("clamped_scale", FSDP))
_ALL = [
    pytest.param(module, name, plan, id=f"{name}-{plan}")
    for module, rows in ROWS.items() for name, row in rows.items() for plan in row
]  # fmt: skip
CASES = [
    *(case for case in _ALL if case.values[1:] in QUICK),
    *seldom(8, (case for case in _ALL if case.values[1:] not in QUICK)),
]
"""Three in a normal run, each eighth of the others in CI, all of them in `make prove`."""


@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # torch's: a hook on the first module
@pytest.mark.parametrize(("module", "name", "plan"), CASES)
def test_a_reported_job_is_equal_refused_or_named(module: ModuleType, name: str, plan: str) -> None:
    expected = ROWS[module][name][plan]
    answer, words = of_verify(module, name, plan)
    assert answer == expected, words
    answer, words = of_training(module, name, plan)
    if expected.startswith("V"):
        assert answer == "named" or of_check(module, name, plan)[0] != E, words
    else:
        assert answer == expected, words


@pytest.mark.slow
def test_a_backward_pass_that_counts_the_batch_is_not_called_kept_state_alone() -> None:
    code, words = of_check(state, "embedding_by_frequency", DP)
    assert code == "J035" and "a backward pass" in words and "scale_grad_by_freq" in words


def page() -> str:
    """The text of docs/trackers.md."""
    lines = [HEAD]
    for module, rows in ROWS.items():
        lines += [f"## {module.__doc__.splitlines()[0].rstrip('.')}" if module.__doc__ else "", ""]
        lines += ["| job | report | plans and verdicts |", "|---|---|---|"]
        for name, row in rows.items():
            verdicts = " · ".join(f"`{plan}` {verdict}" for plan, verdict in row.items())
            lines.append(f"| {name} | {getattr(module, name).__doc__} | {verdicts} |")
        lines.append("")
    return "\n".join(lines)


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run  python tests/exact/test_tracker_reports.py"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
