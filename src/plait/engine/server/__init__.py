"""Groups that send gradients to a server (sync=async), each in a process of its own. The technique is explained in `parallel/server/`.

dealing     who is dealt which portion, which gradients an update takes: no process, no clock on the wall, no tensor
ledger      a row for each gradient that was used or dropped, and what must hold of all rows
setting     what all of them know before they are forked
group       a group: takes a portion and the weights, and returns a gradient
state       a server: its tensors and their optimizer, what it sends, an update, a save
follower    a server beside the first, which does what the first says
lead        the first server: deals, and says what is updated when
processes   all of them forked, and what each returned
record      metrics, ledger and status
"""
