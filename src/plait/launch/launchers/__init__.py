"""Who started this process, read from the environment: one file for each kind of launcher, all with the same result.

membership    what is found: this is number 3 of 8 ranks, or number 1 of 2 machines, and the first is at this address
launcher      how a launcher is described: the names of its variables
torchrun      torchrun, and ranks numbered by hand in torchrun's variables
slurm         a step of Slurm (srun)
mpi           mpirun and mpiexec of Open MPI, MPICH, Intel MPI, MVAPICH; jsrun, PALS, flux
kubernetes    Kubeflow's TrainJob and PyTorchJob, JobSet and indexed Jobs
clouds        SkyPilot, dstack, DGX Cloud Lepton
find          asks them all, and refuses two answers that contradict each other
"""
