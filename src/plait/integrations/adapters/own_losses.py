"""Losses that a model computes itself from its labels, as those of transformers do: apart from it, so that a plan can cut it.

The loss of a model of transformers is the mean over the labels that count (not −100). In parts of a batch that is another mean than
in the whole, so a job has it with the number of these labels as its weight: it is then the mean over those of the *global* batch,
whatever the plan. That is what the Trainer computes with `num_items_in_batch`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

IGNORED = -100
"""A label that does not count."""
SHIFTED = {"ForCausalLM": True, "ForMaskedLM": False, "ForTokenClassification": False}
"""The `loss_type` of models of transformers whose loss is over labels that count -> whether a label is the next token's."""
PER_SAMPLE = "ForSequenceClassification"


class _Logits(Protocol):
    """What a model of transformers returns without labels."""

    logits: Tensor


@dataclass(frozen=True)
class OwnLoss:
    """A model's own loss: `loss(outputs, labels)`, what it is a mean over, and a value for each label that counts."""

    loss: Callable[[Any, Any], Tensor]
    weight: Callable[[Any], Any] | None
    apart: bool
    """Computed from outputs; else the model is given the labels among its inputs, and returns it."""
    metrics: Callable[[Any, Any], dict[str, Tensor]] | None = None


def counted(shifted: bool) -> Callable[[Tensor], Tensor]:
    """Labels -> how many of each sample's count, of shape [samples]."""
    return lambda labels: (labels[..., 1:] if shifted else labels).ne(IGNORED).flatten(1).sum(1)


def of(model: nn.Module) -> OwnLoss:
    """The loss of a model of transformers, or of any that returns one when it is given labels."""
    kind, config = getattr(model, "loss_type", None), getattr(model, "config", None)
    compute = getattr(model, "loss_function", None)
    if config is None or compute is None or getattr(config, "output_router_logits", False):
        return OwnLoss(returned, None, False)
    if kind == PER_SAMPLE:
        return OwnLoss(lambda outputs, y: compute(labels=y, pooled_logits=outputs.logits, config=config), None, True)
    if kind not in SHIFTED:
        return OwnLoss(returned, None, False)
    more = (
        {"config": config} if kind == "ForTokenClassification" else {"vocab_size": config.get_text_config().vocab_size}
    )
    loss = lambda outputs, labels: compute(logits=outputs.logits, labels=labels, **more)  # noqa: E731
    return OwnLoss(loss, counted(SHIFTED[kind]), True, _each(SHIFTED[kind]))


def returned(outputs: object, targets: object) -> Tensor:
    """The loss that a model returned: `outputs["loss"]`, `outputs.loss`, the first of a tuple, or the output itself."""
    if isinstance(outputs, dict):
        return outputs["loss"]
    loss = outputs[0] if isinstance(outputs, (tuple, list)) else getattr(outputs, "loss", outputs)
    return torch.as_tensor(loss)


def _each(shifted: bool) -> Callable[[Any, Tensor], dict[str, Tensor]]:
    """The loss of each label that counts."""

    def metrics(outputs: _Logits, labels: Tensor) -> dict[str, Tensor]:
        logits, labels = (outputs.logits[:, :-1], labels[:, 1:]) if shifted else (outputs.logits, labels)
        counts = labels != IGNORED
        return {"loss": cross_entropy(logits[counts], labels[counts], reduction="none")}

    return metrics
