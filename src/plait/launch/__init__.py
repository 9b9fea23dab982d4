"""How processes come to be, and who watches them.

fork              forks workers on this machine
forkable          whether a fork of this process could compute
supervise         the launcher's loop
failures          which rank is guilty
hangs             which rank hangs, and since when
activity          processor time, disk and network of a process
progress          a row of progress per rank in shared memory
limits            what the operating system must grant
place             rank, world, and the process group
launchers/        whether another launcher (torchrun, Slurm, MPI, Kubernetes) started this process, and as which
nccl              what NCCL is told: patience, flight recorder, communicators
groups            process groups beside one that somebody else made
allocator         how memory is taken from a device
one_device        what the job's code sees of torch.distributed: nothing
attempts          ranks that torchrun or Ray start again: which start they belong to, and how they meet
said_once         what all of torchrun's ranks would say is said by one
scratch           folders that do not outlive their process
channel           connections that outlive the death of a process at another's end
gate              lets only those who know the key into a job's store
loopback          only processes of the same user reach what others listen at here, or torch's store
rendezvous        how processes of several machines meet
nodes             launchers of several machines, which tell each other what they see
stopping          SIGTERM, SIGUSR1 and Ctrl-C: requests to stop, and how a process hears them while it waits
child             the life of a process that is forked
fresh             a fresh process that starts ranks where this one cannot be forked
companion         a process that a rank starts, which neither delays nor ends it
devices           which accelerators there are, without a CUDA call
kept              what the user's code showed, on disk for the next command
detect            this machine as a `Machine`
"""
