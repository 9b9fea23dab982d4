"""What a run looked like, measured beside predicted. Nothing here imports torch."""
