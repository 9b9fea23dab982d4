"""Which plan, will it fit, how fast, why: what a step costs on a machine, found without the machine.

question          from job and machine to what is searched
from_sketch       the model as products and bytes: the workload
formulas          seconds of a workload on devices and on cores, and bytes of the fullest rank, in closed forms
late              what copies and replica groups send each other, and when
estimate          one plan
constants         what was fitted to measurements
search_space      what is searched
search            the best of them
correction        how far off predictions are, learned from measured runs
answer            what `plait plan` says
exactness         what rare synchronisation costs in exactness, and the link speed below which it pays
late_map          which way to synchronise is fastest, by link and spread of speeds
inexact           the best plans that are another training
goals             what fewer and more devices do; the cheapest, fewest, largest
alternatives      other plans and batches than a run's
trial             a few real steps of plans on processors
refusals          what is refused before there are ranks
dryrun/           a plan built and stepped without processes
"""
