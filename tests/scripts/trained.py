"""transformers' Trainer with a small GPT-2 and labels that end early. `--wrong NAME` makes a mistake."""

import argparse

import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

options = argparse.ArgumentParser()
options.add_argument("--batch-size", type=int, default=16)
options.add_argument("--accumulation", type=int, default=1)
options.add_argument("--workers", type=int, default=0)
options.add_argument("--wrong", default="", choices=("", "own-mean", "tokens-of-ranks", "times-ranks"))
options.add_argument("--losses", default="")
given = options.parse_args()
torch.manual_seed(0)
random = torch.Generator().manual_seed(9)
rows = []
for _ in range(110):
    tokens, end = torch.randint(0, 50, (12,), generator=random), int(torch.randint(3, 13, (1,), generator=random))
    rows.append({"input_ids": tokens, "labels": torch.where(torch.arange(12) < end, tokens, -100)})


class Own(Trainer):
    """With a loss of its own for the mistakes."""

    def compute_loss(self, model, inputs, return_outputs=False, **more):
        if given.wrong in ("", "tokens-of-ranks"):
            return super().compute_loss(model, inputs, return_outputs, **more)
        logits = model(input_ids=inputs["input_ids"]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        return loss * self.args.world_size if given.wrong == "times-ranks" else loss


class Losses(TrainerCallback):
    """Records the trainer's log."""

    def on_log(self, args, state, control, logs=None, **more):
        if given.losses and state.is_world_process_zero and "loss" in logs:
            print(logs["loss"], logs["grad_norm"], file=open(given.losses, "a"))  # noqa: SIM115


settings = TrainingArguments(
    "out", per_device_train_batch_size=given.batch_size, gradient_accumulation_steps=given.accumulation, max_steps=12, learning_rate=2e-3,
    use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True, dataloader_num_workers=given.workers,
    average_tokens_across_devices=given.wrong != "tokens-of-ranks",
)  # fmt: skip
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=12, n_embd=24, n_layer=2, n_head=2))
Own(model, settings, train_dataset=rows, callbacks=[Losses()]).train()
