"""A run: the training loop of one rank.

train             the training of one rank: the loop from step to step
train_step        one step, in the order in which it happens
rank_start        where a rank's training begins: its engine, at a checkpoint or given weights
rank_failures     what a rank keeps when its training ends in an error
run_schedule      after which steps a run ends and evaluates
run_notes         what a rank reports to the terminal beside its steps
analyse           what a rank knows of the model before anything of it is cut
build             from job and plan to a rank's model and optimizer
engine            one rank's training, to be driven step by step: batches, steps, checkpoints
callbacks         what a job has done beside its steps
logged            numbers that a job records while a step runs
passes            forward and backward passes of a step
trained           which parameters a run trains, and that it stays so
step              what a step did
batch_weights     what micro-batches weigh in the loss, and which of them a rank runs
stats_reader      when the host reads what came of a step, and what follows from it
spans             what took time in a step
turns             the phases of a step, one after the other
memory            a rank's memory, measured
memory_use        what it was used for, beside the bill
evaluate          metrics over held-out data
generate          prompts continued by the model in training
try_metrics       the job's metrics, tried before training
batch_dependence  whether a model in eval mode uses the other samples of a batch
replay            a past step computed again, sample by sample
nonfinite         steps that are not finite
traffic           what a rank sends in a step
run_directory     what a run leaves behind
resume            which run goes on, and where
elastic           going on when a rank is lost
metrics           metrics, events and status of a rank
server/           groups that send gradients to a server
joined_ranks      ranks that another launcher started agree on a run
"""
