"""The Keras model of before.py as a job:  plait train examples/ports/keras/job.py --plan "fsdp=2" """

from before import BATCH, EPOCHS, model, points

import plait


def job() -> plait.Job:
    return plait.from_keras(model(), *points(), batch=BATCH, epochs=EPOCHS)
