"""Integrations with other software; no run needs them, and the core can be understood without this folder.
The core does not import them; commands load the part that they need. Each part imports the core, and no other part.

adapters/       convert trainings of other frameworks to a `Job`: `plait.from_loop`, `from_trainer`, `from_lightning`, `from_keras`
trackers/       send a run's metrics to experiment trackers: `plait train --tracker`
submit/         write files for schedulers from a plan: `plait submit`
ray             `plait.ray`: runs whose ranks Ray Train starts
export_weights  `plait.ExportWeights`: Hugging Face folders of the weights, written while a run trains
"""
