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
launchers         how a launcher is described (the names of its variables); torchrun, Slurm, MPI, Kubernetes, clouds
find_launcher     whether another launcher started this process, and as which; two answers that contradict each other are refused
nccl              what NCCL is told: patience, flight recorder, communicators
groups            process groups beside one that somebody else made
one_device        what the job's code sees of torch.distributed: nothing
attempts          ranks that torchrun or Ray start again: which start they belong to, how they meet, and who of them says what all would say
scratch           folders that do not outlive their process
channel           connections that outlive the death of a process at another's end
gate              lets only those who know the key into a job's store
loopback          only processes of the same user reach what others listen at here, or torch's store
rendezvous        how processes of several machines meet
node_rows         what launchers of several machines say to each other: a row for each machine in the store
round             which machine has which ranks, from one start of the ranks to the next
nodes             the machines of a run, from round to round: the state of each
stopping          SIGTERM, SIGUSR1 and Ctrl-C: requests to stop, and how a process hears them while it waits
child             the life of a process that is forked; a companion, which a rank starts, and which neither delays nor ends it
fresh             a fresh process that starts ranks where this one cannot be forked
devices           which accelerators there are, without a CUDA call; how memory is taken from one
kept              what the user's code showed, on disk for the next command
detect            this machine as a `Machine`
"""
