"""The loop of before.py as a job:  plait train examples/ports/accelerate/job.py --plan "dp=2" """

from before import CLIP, EPOCHS, parts

import plait


def job() -> plait.Job:
    model, optimizer, dataloader, criterion, scheduler = parts()
    return plait.from_loop(model, optimizer, dataloader, criterion, scheduler, epochs=EPOCHS, clip=CLIP)
