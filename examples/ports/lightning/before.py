"""A classifier of points with Lightning:  python examples/ports/lightning/before.py"""

from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, HELD_OUT, BATCH, EPOCHS = 96, 21, 8, 3


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points of the plane, and the ring around the origin (of three) that each is in."""
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
    return x, torch.bucketize(x.norm(dim=1), torch.tensor([0.8, 1.5]))


class Rings(L.LightningModule):
    def __init__(self, width: int = 32, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(
            nn.Linear(2, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        out = self(x)
        self.log_dict({"val_loss": cross_entropy(out, y), "val_accuracy": (out.argmax(1) == y).float().mean()})

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.hparams.lr, total_steps=total, cycle_momentum=False
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loaders() -> tuple[DataLoader, DataLoader]:
    held_out = DataLoader(TensorDataset(*points(HELD_OUT, 2)), BATCH)
    return DataLoader(TensorDataset(*points(SAMPLES, 1)), BATCH, shuffle=True), held_out


class Losses(L.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, module: Rings, outputs: dict, batch: object, batch_idx: int
    ) -> None:
        self.seen.append(float(outputs["loss"]))


def main(order: Sequence[int] | None = None) -> list[float]:
    """Return the loss of each step. `order`: sample indices, instead of a random order."""
    L.seed_everything(0)
    module, losses = Rings(), Losses()
    train, held_out = loaders()
    if order is not None:
        train = DataLoader(torch.utils.data.Subset(train.dataset, list(order)), BATCH)
    trainer = L.Trainer(
        max_epochs=EPOCHS, gradient_clip_val=1.0, callbacks=[losses], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, accelerator="cpu",
    )  # fmt: skip
    trainer.fit(module, train, held_out)
    return losses.seen


if __name__ == "__main__":
    print(main())
