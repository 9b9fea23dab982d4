"""Experiment trackers: TensorBoard, Weights & Biases, MLflow and Trackio get the values of `metrics.jsonl`.

tracker_processes   the process of a tracker, which follows `metrics.jsonl`, and rank 0's part
packages            the trackers: the calls of each package
"""
