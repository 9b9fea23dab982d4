"""A causal language model, fine-tuned on answers with the Trainer:  python examples/ports/trainer/before.py

Samples are prompts and answers of unequal length. The prompts and the padding are masked (−100), so the loss is over the answers.
"""

import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SAMPLES, HELD_OUT, WORDS = 48, 9, 32
Sample = dict[str, list[int]]


def sums(count: int, seed: int) -> list[Sample]:
    """Rows of numbers; the answer is their running sum."""
    generator, found = torch.Generator().manual_seed(seed), []
    for i in range(count):
        prompt = torch.randint(1, WORDS, (3 + i % 5,), generator=generator)
        answer = prompt.cumsum(0) % (WORDS - 1) + 1
        labels = [-100] * len(prompt) + answer.tolist()
        found.append({"input_ids": [*prompt.tolist(), *answer.tolist()], "labels": labels})
    return found


def collate(samples: list[Sample]) -> dict[str, Tensor]:
    longest = max(len(s["input_ids"]) for s in samples)
    pad = lambda row, value: [*row, *[value] * (longest - len(row))]  # noqa: E731
    mask = [[1] * len(s["input_ids"]) for s in samples]
    return {
        "input_ids": torch.tensor([pad(s["input_ids"], 0) for s in samples]),
        "attention_mask": torch.tensor([pad(row, 0) for row in mask]),
        "labels": torch.tensor([pad(s["labels"], -100) for s in samples]),
    }


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, vocab_size=WORDS, use_cache=False))


def arguments(**more: object) -> TrainingArguments:
    return TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=2,
        learning_rate=1e-2, lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.1, max_grad_norm=1.0, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, remove_unused_columns=False, **more,
    )  # fmt: skip


def main(order: Sequence[int] | None = None) -> list[float]:
    """Return the loss of each step. `order`: sample indices, instead of a random order."""
    samples, more = sums(SAMPLES, 1), {}
    if order is not None:
        samples, more = [samples[i] for i in order], {"train_sampling_strategy": "sequential"}
    trainer = Trainer(model(), arguments(**more), train_dataset=samples, data_collator=collate)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


if __name__ == "__main__":
    print(main())
