"""What a plan that is not one device's training computes, written down for one process.

server      groups that send gradients to a server: its ledger, played again
"""
