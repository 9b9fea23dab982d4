"""How processes come to be, and who watches them.

fork              forks workers on this machine
supervise         the launcher's loop
failures          which rank is guilty
failure_report    what a failed rank says of its failure
hangs             which rank hangs, and since when
activity          processor time, disk and network of a process
stacks            where a process is, asked for by a signal
progress          a row of progress per rank in shared memory
limits            what the operating system must grant
place             rank, world, and the process group
started_by        whether another launcher (torchrun, Slurm, MPI) started this process
devices           which accelerators there are, without a CUDA call
detect            this machine as a `Machine`
"""
