"""Who started this process, read from the environment.

launcher      how a launcher is described: the names of its variables
known         torchrun, Slurm, MPI, Kubernetes, clouds: the variables of each
find          asks them all, and refuses two answers that contradict each other
"""
