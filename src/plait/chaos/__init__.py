"""The fault matrix: what goes wrong on purpose in small runs of the user's own job, and whether plait keeps what it promises.

strike            what happens inside a rank, at a step and phase
watched           a `plait train` in a process of its own, seen from outside
scene             a fault, where it is posed (its folder, its runs), and how it is judged
ranks             ranks that die, raise, hang or are slow; numbers and clocks that are wrong
disks             checkpoints that are damaged before a resume; disks that are full or read-only
launchers         launchers that are killed, asked to stop, or two
hosts             two machines on one: network namespaces with a cable between them
machines          machines, links and agents that are lost
matrix            all of them, the run through them, and what was found as text, Markdown and JSON
"""
