"""A vision transformer with mixup and a moving average of its weights, in plain PyTorch on one device.

python examples/ports/vit_ema/before.py
"""

import torch
from stripes import BATCH, STEPS, Mixup, Stripes, vit
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup


def main() -> None:
    """Train, and print the accuracy of the averaged weights on test images."""
    torch.manual_seed(0)
    model = vit()
    plain = [p for n, p in model.named_parameters() if n.endswith("bias") or "layernorm" in n]
    rest = [p for n, p in model.named_parameters() if not (n.endswith("bias") or "layernorm" in n)]
    optimizer = torch.optim.AdamW(
        [{"params": plain, "weight_decay": 0.0}, {"params": rest}], lr=3e-3, weight_decay=0.05
    )
    schedule = get_cosine_schedule_with_warmup(optimizer, 6, STEPS)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loader, step = DataLoader(Mixup(Stripes(512, 1)), BATCH, shuffle=True), 0
    while step < STEPS:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(**inputs).logits, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            averaged.update_parameters(model)
            step += 1
            if step == STEPS:
                break
    averaged.eval()
    right = 0
    with torch.no_grad():
        for inputs, targets in DataLoader(Stripes(128, 2), BATCH):
            right += int((averaged(**inputs).logits.argmax(-1) == targets).sum())
    print(f"step {step}  loss {loss.item():.4f}  accuracy of the average {right / 128:.3f}")


if __name__ == "__main__":
    main()
