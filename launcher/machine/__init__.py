"""This computer: Python, GPUs, processes, locks, git. Nothing here knows a stage or a run."""
