"""Worker groups that send gradients to a parameter server (outer_sync=async), each in a separate process. `parallel/server/` explains
the technique.

dealer         assigns portions of samples to groups, selects the gradients of each update, keeps the ledger; without processes
group          a group: takes a portion and the weights, and returns a gradient; also the shared setting and the messages
state          a server: its tensors and their optimizer, weights it sends, updates, saves
processes      starts and supervises the server processes: the lead assigns portions and orders updates, followers execute them
server_record  metrics, ledger and status
"""
