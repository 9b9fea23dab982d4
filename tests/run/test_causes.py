"""The causes that the job check and verify name for a difference: only observed ones."""

import jobs_carried as jobs
import pytest

from plait.config.errors import PlaitError
from plait.config.plan import Plan
from plait.proof.job import check
from plait.proof.verify import verify

MICRO = Plan(microbatches=2)


def found(kind: str, plan: Plan = MICRO) -> tuple[str, str]:
    """Returns (code, why) of the check's findings."""
    checked = check.check_job(jobs.job(kind), plan)
    assert not checked.failed, checked.failed
    return next(((p.code, p.why) for p in checked.problems), ("", ""))


def test_a_count_that_matters_later_is_found_before_training() -> None:
    code, why = found("warms_up")
    assert code == "J035" and "WarmsUp.rate" in why and "after step " in why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "word"),
    [
        ("anneals", "J035", "Anneals.passes"), ("own_noise", "", ""), ("observes", "", ""), ("plain", "", ""),
    ],
)  # fmt: skip
def test_values_that_a_model_carries(kind: str, code: str, word: str) -> None:
    """Consecutive micro-batches draw from a generator the values that the full batch would draw."""
    found_code, why = found(kind)
    assert found_code == code and word in why, (found_code, why)


@pytest.mark.slow
def test_a_generator_of_the_models_own_is_named() -> None:
    code, why = found("own_noise", Plan(dp=2))
    assert code == "J033" and "OwnNoise.noise" in why


@pytest.mark.slow
def test_a_count_is_harmless_where_the_model_is_called_once_a_step() -> None:
    assert found("anneals", Plan(dp=2)) == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["warms_up", "anneals"])
def test_verify_agrees_and_blames_the_count(kind: str) -> None:
    verdict = verify(jobs.job(kind), MICRO, steps=2, seconds=0.0)
    assert not verdict.equal and verdict.code == "V029" and f"{jobs.MODELS[kind].__name__}." in verdict.cause


@pytest.mark.slow
def test_random_numbers_are_blamed_only_if_the_difference_goes_without_them() -> None:
    """Dropout is in the model, but numpy's mask differs."""
    verdict = verify(jobs.job("host_mask"), Plan(dp=2), steps=2, seconds=0.0)
    assert not verdict.equal and verdict.code == "V015" and "numpy" in verdict.cause
    assert verify(jobs.job("observes"), MICRO, steps=2, seconds=0.0).equal


@pytest.mark.parametrize("kind", ["packed", pytest.param("packed_lstm", marks=pytest.mark.slow)])
def test_dropout_in_a_packed_sequence_is_named(kind: str) -> None:
    checked = check.check_job(jobs.job(kind), Plan(dp=2))
    assert not checked.problems and any("dropout inside rnn runs over a packed" in line for line in checked.unchecked)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "word"),
    [("asserts", "J051", "AssertionError"), ("raises", "J011", "no such layer"), ("makes_layer", "J052", "middle.0.weight")],
)
def test_what_fails_is_called_by_its_name(kind: str, code: str, word: str) -> None:
    with pytest.raises(PlaitError) as raised:
        verify(jobs.job(kind), Plan(dp=2))
    assert raised.value.codes == [code] and word in raised.value.problems[0].what


@pytest.mark.slow
@pytest.mark.parametrize("file", ["tensors/float64.py", "model/trace.py", "safetensors/torch.py"])
def test_the_activity_that_failed_is_named(file: str) -> None:
    from plait.proof.verify import _find_activity

    words = {"tensors/float64.py": "compute", "model/trace.py": "record", "safetensors/torch.py": "save"}
    trace = f'  File "plait/proof/verify.py", line 1\n  File "plait/{file}", line 2, in x'
    assert _find_activity(trace).startswith(words[file])


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("by_objects", "J030"), pytest.param("by_masked_tokens", "J030", marks=pytest.mark.slow),
        pytest.param("in_the_model", "J031", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_counts_rare_samples_is_found_before_training(name: str, code: str) -> None:
    """In the first steps all parts have equal weight."""
    checked = check.check_job(getattr(jobs, name)(), Plan(dp=2))
    assert not checked.failed, checked.failed
    assert [p.code for p in checked.problems] == [code], checked.problems


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "equal"), [("norm", False), ("module", False), ("elements", True)])
def test_a_hook_that_limits_large_gradients_only(kind: str, equal: bool) -> None:
    """No gradient of the first steps reaches the limit. Elementwise, the result is the same in every part."""
    verdict = verify(jobs.limited(kind), Plan(dp=2))
    assert verdict.equal == equal and (equal or verdict.code == "V021"), verdict
