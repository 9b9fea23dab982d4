"""Algorithms of plans that change the training result, each in one process and in plain PyTorch, as references of `verify`.

registry          find the algorithm of a plan
replicas          replica groups: local and post-local SGD, DiLoCo, streaming DiLoCo
server            groups that send gradients to a server: their run, and a replay of its ledger
compressed_sums   compressed sums with error feedback (grad_compression)
"""
