"""Pipeline parallelism (pp): the model cut into stages, micro-batches flow through them.

strategy          what it is, what it refuses, how a rank is wired
schedules         orders of forwards and backwards, as tables
schedule_search   the best table for measured times and a limit on memory
partition         where to cut a model into stages, and which rank has which
stage             a model's own forward, run on a stage
runtime           a rank's row of the table, executed
p2p               sends and receives between stages, in order
"""
