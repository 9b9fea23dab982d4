"""Mapping of the tensors in a file to those of the model."""

import pytest

from plait.checkpoint.foreign_weights import match_names
from plait.model.pretrained import NameRules

BASE = ["model.embed.weight", "model.0.q.weight", "model.0.q.bias", "lm_head.weight"]
LORA = [
    "base_model.model.model.embed.weight",
    "base_model.model.model.0.q.base_layer.weight",
    "base_model.model.model.0.q.base_layer.bias",
    "base_model.model.model.0.q.lora_A.default.weight",
    "base_model.model.model.0.q.lora_B.default.weight",
    "base_model.model.lm_head.original_module.weight",
    "base_model.model.lm_head.modules_to_save.default.weight",
]


def test_an_adapter_is_new_and_its_base_is_found() -> None:
    found = match_names(LORA, BASE, {}, NameRules("model"))
    assert found.new == tuple(LORA[3:5]) and not found.missing and not found.unknown
    assert found.sources[LORA[1]] == "model.0.q.weight"
    assert found.sources[LORA[5]] == found.sources[LORA[6]] == "lm_head.weight", "what peft copies begins as the module"


def test_an_adapter_is_missing_in_weights_of_the_wrapped_model() -> None:
    found = match_names(LORA, [name for name in LORA if "lora_B" not in name], {}, NameRules("model"))
    assert found.missing == (LORA[4],) and not found.new, "weights that have adapters have all of them"


def test_an_adapter_without_its_base_is_no_adapter() -> None:
    found = match_names(
        LORA, [name for name in BASE if ".q.weight" not in name and ".q.bias" not in name], {}, NameRules("model")
    )
    assert set(LORA[1:5]) == set(found.missing) and not found.new


@pytest.mark.parametrize("name", ("model.0.q.lora_magnitude_vector.default.weight", "model.0.q.gate.weight"))
def test_what_may_depend_on_the_base_is_not_new(name: str) -> None:
    found = match_names([*LORA, f"base_model.model.{name}"], BASE, {}, NameRules("model"))
    assert found.missing == (f"base_model.model.{name}",)


def test_the_prefix_of_the_model_under_a_head() -> None:
    without = [name.removeprefix("model.") for name in BASE[:3]]
    assert match_names(BASE, without, {"lm_head.weight": "model.embed.weight"}, NameRules("model")).missing == (
        "lm_head.weight",
    )
    found = match_names(BASE[:3], without, {"lm_head.weight": "model.embed.weight"}, NameRules("model"))
    assert not found.missing and found.sources["model.0.q.bias"] == "0.q.bias"
    assert match_names(without, BASE[:3], {}, NameRules("model")).sources["0.q.bias"] == "model.0.q.bias"
    assert match_names(BASE[:3], without, {}, NameRules()).missing == tuple(BASE[:3]), "nothing is guessed"


def test_what_differs_must_be_declared() -> None:
    names, stored = [*BASE[:3], "score.weight"], [*BASE, "pooler.weight"]
    found = match_names(names, stored, {}, NameRules("model"))
    assert found.missing == ("score.weight",) and found.unknown == ("lm_head.weight", "pooler.weight")
    found = match_names(names, stored, {}, NameRules("model", new=("score",), unused=("lm_head", "pool*")))
    assert found.new == ("score.weight",) and not found.missing and not found.unknown
    found = match_names(names, stored, {}, NameRules("model", ignored=(r"^pooler",), new=("scores",)))
    assert found.missing == ("score.weight",) and found.unknown == ("lm_head.weight",)


def test_a_declared_module_is_found_where_the_file_has_it() -> None:
    found = match_names(BASE, BASE, {}, NameRules("model", new=("lm_head",)))
    assert found.sources["lm_head.weight"] == "lm_head.weight" and not found.new
