"""Lightning, which starts its second process itself. `--wrong NAME` makes a mistake."""

import argparse

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

options = argparse.ArgumentParser()
options.add_argument("--batch-size", type=int, default=16)
options.add_argument("--devices", type=int, default=1)
options.add_argument("--accumulation", type=int, default=1)
options.add_argument("--wrong", default="", choices=("", "batch-norm", "times-ranks", "no-sampler", "tokens"))
options.add_argument("--losses", default="")
given = options.parse_args()
lightning.seed_everything(0, verbose=False)
points = torch.randn(150, 8)
targets = (points.sum(1) > 0).long()
if given.wrong == "tokens":
    targets[torch.rand(150) < 0.35] = -100


class Classifier(lightning.LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(16) if given.wrong == "batch-norm" else nn.LayerNorm(16)
        self.layers = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2))

    def training_step(self, batch, _):
        loss = F.cross_entropy(self.layers(batch[0]), batch[1])
        if given.losses and self.trainer.is_global_zero:
            print(loss.item().hex(), file=open(given.losses, "a"))  # noqa: SIM115
        return loss * self.trainer.world_size if given.wrong == "times-ranks" else loss

    def validation_step(self, batch, _):
        self.log("valid", F.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


data = TensorDataset(points, targets)
trainer = lightning.Trainer(
    accelerator="cpu", devices=given.devices, strategy="ddp" if given.devices > 1 else "auto", max_epochs=3, logger=False, gradient_clip_val=1.0,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=given.accumulation,
    use_distributed_sampler=given.wrong != "no-sampler",
)  # fmt: skip
trainer.fit(Classifier(), DataLoader(data, given.batch_size, shuffle=True), DataLoader(data, 25))
