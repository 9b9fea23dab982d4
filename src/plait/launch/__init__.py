"""Start ranks, connect them, and supervise them.

fork              fork ranks on this node
forkable          check whether a fork of this process can compute
supervisor        the launcher's loop
failures          find the rank that caused a failure
hangs             find the rank that hangs, and since when
activity          CPU time, disk and network use of a process
progress          one row of progress per rank, in shared memory
limits            operating system limits that a run needs
place             rank, number of ranks and process group
launchers         environment variables of torchrun, Slurm, MPI, Kubernetes and clouds
find_launcher     detect the launcher that started this process; contradicting launchers are an error
nccl              NCCL settings: timeouts, flight recorder, communicators
groups            process groups in addition to one that the caller made
one_device        hide torch.distributed from the job's code
attempts          ranks that torchrun or Ray restart: their attempt number, store and shared messages
scratch           temporary folders that are removed after their process ends
channel           connections that survive the death of a peer process
gate              admit only processes that have the job's key to the job's store
loopback          restrict loopback sockets and torch's store to processes of the same user
rendezvous        connect processes on several nodes
node_rows         state that launchers exchange: one row per node in the store
round             assignment of ranks to nodes, from one start of the ranks to the next
nodes             state of each node of a run, in each round
stopping          requests to stop: SIGTERM, SIGUSR1 and Ctrl-C
child             a forked process, and a companion process that cannot delay or end its rank
fresh_process     start ranks from a new Python process if this one cannot be forked
devices           list accelerators without a CUDA call; configure the allocator
sketch_cache      cache of sketches on disk
detect            detect this machine as a `Machine`
"""
