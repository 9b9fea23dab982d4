"""The file that a scheduler wants, written from a plan: one file for each kind of scheduler.

command       the command
submission    what is to be started: job, plan, machines, and the words of `plait train`
slurm         a script for sbatch
jobset        a JobSet of Kubernetes
trainjob      a TrainJob of Kubeflow
skypilot      a task of SkyPilot
ray           a job for a cluster of Ray
ssh           a command for each of some hosts
"""
