"""A typical LoRA script with transformers and peft: one device, a loop.

python examples/ports/lora/before.py
"""

import torch
from chats import Chats, base
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


def main(steps: int = 20) -> list[float]:
    """Train, and return the loss of each step."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base(), dtype=torch.float32)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    loader, losses = DataLoader(Chats(), batch_size=8, shuffle=True), []
    model.train()
    while len(losses) < steps:
        for inputs, targets in loader:
            logits = model(**inputs).logits
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    for step, loss in enumerate(main(), 1):
        print(f"step {step}  loss {loss:.6f}")
