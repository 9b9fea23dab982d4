"""The LightningModule of before.py as a job:  plait train examples/ports/lightning/job.py --plan "fsdp=2" """

import lightning as L
from before import EPOCHS, Rings, loaders

import plait


def job() -> plait.Job:
    L.seed_everything(0, verbose=False)
    train, held_out = loaders()
    return plait.from_lightning(Rings(), train, epochs=EPOCHS, held_out=held_out, clip=1.0)
