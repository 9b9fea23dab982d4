"""pipeline: say here what lives in this folder, a line for each file."""
