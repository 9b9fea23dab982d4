"""The Trainer of before.py as a job:  plait train examples/ports/trainer/job.py --plan "tp=2 microbatches=2" """

from before import HELD_OUT, SAMPLES, arguments, collate, model, sums

import plait


def job() -> plait.Job:
    held_out = sums(HELD_OUT, 2)
    return plait.from_trainer(
        model(), arguments(), train_dataset=sums(SAMPLES, 1), data_collator=collate, eval_dataset=held_out
    )
