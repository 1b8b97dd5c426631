"""This worker's process beside the training: memory limits, progress, reports, timing, signals and the exit."""
