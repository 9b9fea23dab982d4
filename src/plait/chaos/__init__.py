"""The fault matrix: faults injected into small runs of the user's own job, with the expected outcome of each.

strike            faults inside a rank, at a step and phase
watched_run       a `plait train` in its own process, observed from outside
scene             folder, runs and checks of one fault
ranks             ranks that die, raise, hang or are slow; wrong values and clocks
disks             damaged checkpoints before a resume; full or read-only disks
launchers         launchers that are killed, stopped, or started twice
hosts             two hosts on one machine: network namespaces with a virtual cable
nodes             lost nodes, links and launchers
matrix            all faults, the loop over them, and reports as text, Markdown and JSON
"""
