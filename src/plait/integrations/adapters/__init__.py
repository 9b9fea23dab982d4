"""Convert existing trainings to a `Job`, with one call per framework.
An adapter reads the objects of a script (a module, an optimizer, a DataLoader, a scheduler, arguments), and takes the settings that affect
the result. Settings of parallelism and computation belong to a plan, and a warning names the plan's keys. Unsupported settings are
rejected with the reason.

loop              plait.from_loop: the objects that a script passes to accelerator.prepare
trainer           plait.from_trainer: the Trainer of transformers
lightning         plait.from_lightning: a LightningModule
keras             plait.from_keras: a compiled Keras model on torch
loaders           samples, order and batch size of a DataLoader
"""
