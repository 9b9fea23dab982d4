"""Pipeline parallelism (pp): the model is split into stages, through which micro-batches are passed.

strategy          the technique, the plans that it rejects, and the wiring of a rank
schedules         orders of forwards and backwards, as tables
schedule_search   the best table for measured times and a limit on memory
partition         the split of a model into stages, and the rank of each stage
stage             a model's own forward, run on a stage
runtime           executes a rank's row of the table
p2p               sends and receives between stages, in order
"""
