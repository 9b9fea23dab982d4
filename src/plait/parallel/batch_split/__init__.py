"""Local batches of unequal size, by measured or given speeds (batch_split).

strategy         the technique: costs, exactness, validation of the plan
batch_balancer   adapts the split to measured speeds during training
"""
