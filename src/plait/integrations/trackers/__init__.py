"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and Trackio get the numbers of `metrics.jsonl`.

follow     the process of a tracker, which follows `metrics.jsonl`, and what rank 0 does for it
packages   the trackers: how each package is given a run and its numbers
"""
