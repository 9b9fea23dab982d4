"""Plans that are another training than one device's: each one's algorithm in one process, in plain PyTorch, to be equal to.

find              which plan has an algorithm of its own
replicas          replica groups: local and post-local SGD, DiLoCo, streaming DiLoCo
server            groups that send gradients to a server: their run, and its ledger played again
compressed        compressed sums with error feedback (compress)
"""
