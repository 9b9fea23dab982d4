"""The run engine: the training loop of one rank.

train             trains one rank: the loop over steps, and the state it saves when it ends in an error
train_step        one optimizer step in order of execution; checks that the set of trained parameters does not change
rank_start        starts a rank: makes the engine, restores state, schedules evaluations and the end, reports to the launcher
model_analysis    analyzes the model before it is sharded; checks whether samples of a batch depend on each other in eval mode
build             builds a rank's sharded model and its optimizer from a job and a plan
engine            drives the training of one rank step by step: batches, steps, checkpoints
callbacks         user callbacks after steps, evaluations and saves
step_log          values that a job logs during a step
passes            forward and backward passes of a step, phase by phase, and the loss weights of micro-batches
step              results and timings of a step
stats_reader      reads a step's statistics on the host, and skips or averages the step accordingly
memory            measures the memory of a rank
memory_use        memory use by category, compared with the plan's memory estimate
evaluate          metrics over held-out data: tried before training, evaluated during training
generate          text generation with the model being trained
replay            recomputes a past step, sample by sample
nonfinite         steps with a non-finite loss or gradient norm
traffic           messages that a rank sends in a step
run_directory     the files of a run
resume            finds the run and checkpoint to resume
elastic           restarts after a lost rank from snapshots in memory
metrics           metrics, events and status of a rank
server/           worker groups that send gradients to a parameter server
external_ranks    agreement on a run directory among ranks started by an external launcher
"""
