"""Unmodified models of the Hugging Face library: they train without a cache, and their configs keep the user's settings."""

from typing import Any

import jobs_real
import pytest
import torch
from torch import nn

from plait.engine.engine import Engine
from plait.model.build_model import run_model
from plait.model.pretrained import KERNEL_PRODUCT, enable_float64_experts


def llama() -> Any:
    return jobs_real.llama().model()


class Wrapped(nn.Module):
    """A user's own module around one of the library's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, **given: Any) -> Any:
        return self.inner(**given)


def test_training_keeps_no_cache_and_leaves_the_config_as_it_was() -> None:
    with Engine(jobs_real.llama(), "dp=1", device="cpu") as engine:
        seen: list[Any] = []
        engine.model.register_forward_hook(lambda m, args, out: seen.append((m.config.use_cache, out.past_key_values)))
        engine.step(next(engine.batches()))
        assert seen == [(False, None)] and engine.model.config.use_cache is True
        assert engine.model(torch.ones(1, 4, dtype=torch.long)).past_key_values is not None


@pytest.mark.parametrize("made", [llama, Wrapped])
def test_inputs_that_ask_for_the_cache_get_it(made: Any) -> None:
    model, words = made(), {"input_ids": torch.ones(2, 4, dtype=torch.long)}
    assert run_model(model, words).past_key_values is None
    assert run_model(model, {**words, "use_cache": True}).past_key_values is not None


def test_every_config_in_a_model_is_meant_and_restored() -> None:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"model_type": "llama", "vocab_size": 31, "num_key_value_heads": 2, **small}
    vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **small}
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=5))
    words = torch.tensor([[5, 5, 5, 5, 1, 2]])
    configs = model.config.text_config, model.model.language_model.config
    assert run_model(model, {"input_ids": words, "pixel_values": torch.ones(1, 3, 8, 8)}).past_key_values is None
    assert all(config.use_cache is True for config in configs)


def test_a_model_that_fails_gets_its_config_back() -> None:
    model = llama()
    with pytest.raises(Exception):  # noqa: B017
        run_model(model, {"input_ids": torch.full((1, 4), 99)})
    assert model.config.use_cache is True


def test_a_cache_that_was_turned_off_stays_off() -> None:
    model = llama()
    model.config.use_cache = False
    run_model(model, {"input_ids": torch.ones(1, 4, dtype=torch.long)})
    assert model.config.use_cache is False


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_that_are_alike_give_what_they_give_when_they_are_copied(transposed: bool) -> None:
    import transformers.integrations.moe as moe

    enable_float64_experts()
    product = getattr(moe, KERNEL_PRODUCT)
    row = torch.randn(6, dtype=torch.float64)
    alike = row.expand(4, 5, 6)
    weight = alike.mT if transposed else alike
    inputs, ends = torch.randn(9, weight.shape[1], dtype=torch.float64), torch.tensor([2, 2, 7, 9], dtype=torch.int32)
    torch.testing.assert_close(product(inputs, weight, ends), product(inputs, weight.contiguous(), ends))
