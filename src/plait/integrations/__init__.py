"""What connects plait to other software, and no run needs: leave this folder unread to understand the core.
Nothing of the core imports it, but commands that load a part of it when they are called. Each part imports the core, and none
imports another.

adapters/       training written for other frameworks, made a `Job`: `plait.from_loop`, `from_trainer`, `from_lightning`, `from_keras`
trackers/       experiment trackers that get a run's metrics: `plait train --tracker`
submit/         files for schedulers, written from a plan: `plait submit`
ray             `plait.ray`: a run whose ranks Ray Train starts
export_weights  `plait.ExportWeights`: Hugging Face folders of the weights, written while a run trains
"""
