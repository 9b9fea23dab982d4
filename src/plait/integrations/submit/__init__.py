"""The file that a scheduler wants, written from a plan: one file for each kind of scheduler.

command       the command
submission    what is to be started: job, plan, machines, and the words of `plait train`
scheduler     how a scheduler is described: what it takes, what it cannot
shell         scripts as templates, and words as a shell reads them
yaml          values as YAML that a person can read
slurm         a script for sbatch
pods          what all kinds of Kubernetes have in common: a pod on each machine
jobset        a JobSet of Kubernetes
trainjob      a TrainJob of Kubeflow
skypilot      a task of SkyPilot
ray           a job for a cluster of Ray
ssh           a command for each of some hosts
"""
