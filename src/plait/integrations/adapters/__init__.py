"""Training as people have it today, made a `Job` by one call for each framework.
An adapter reads the very objects that a script has (a module, an optimizer, a data loader, a scheduler, arguments) and takes what
decides the result. What says how to split or compute goes into a plan, and is told. What a job cannot mean is refused, with the reason.

loop              plait.from_loop: the objects of a loop, as one gives them to accelerator.prepare; an optimizer, made again
trainer           plait.from_trainer: the Trainer of transformers
lightning         plait.from_lightning: a LightningModule
keras             plait.from_keras: a compiled Keras model on torch
loaders           what a DataLoader says of training: samples, order, batch
"""
