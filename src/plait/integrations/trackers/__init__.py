"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and Trackio get the numbers of `metrics.jsonl`.

beside     a process for each, beside rank 0
follow     what that process does: follow `metrics.jsonl`
packages   the trackers themselves
"""
