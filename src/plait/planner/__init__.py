"""Predict the speed and memory of plans, and search the best plan for a job on a machine, without that machine.

plan_request      turns a job and a machine into a search space
workload          describes a model as matrix products and bytes
formulas          closed forms: seconds of a workload on GPUs and CPU cores, and bytes of the fullest rank
sync_costs        bytes and seconds of messages between replicas and between replica groups
estimate          predicts one plan
constants         constants fitted to measurements
search_space      the plans to search
search            finds the best plans
correction        prediction errors, learned from measured runs
answer            the output of `plait plan`
exactness         the loss in progress from infrequent synchronization, and the link speed below which it pays
sync_map          the fastest synchronization method by link speed and spread of rank speeds
inexact           the best plans that change the training result
goals             scaling over device counts; the cheapest, smallest and largest settings
alternatives      other plans and batch sizes for a measured run
trial             times a few real steps of plans on CPU processes
refusals          rejects invalid plans before any rank starts
dryrun/           builds and steps a plan without processes
"""
