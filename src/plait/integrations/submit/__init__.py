"""Write a file for a scheduler from a plan, with one module per kind of scheduler.

command       the command
submission    a submission: job, plan, nodes, and the options of `plait train`
slurm         a script for sbatch
jobset        a JobSet of Kubernetes
trainjob      a TrainJob of Kubeflow
skypilot      a task of SkyPilot
ray           a job for a Ray cluster
ssh           one command per host
"""
