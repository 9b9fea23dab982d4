"""Groups that send gradients to a server (outer_sync=async), each in a process of its own. The technique is explained in `parallel/server/`.

dealing     who is dealt which portion, which gradients an update takes, and the ledger of them: no process, no clock on the wall, no tensor
group       a group: takes a portion and the weights, and returns a gradient; what groups and servers know before they are forked, and their messages
state       a server: its tensors and their optimizer, what it sends, an update, a save
processes   the servers: the first deals and says what is updated when, others do what it says; groups and servers forked and watched
record      metrics, ledger and status
"""
