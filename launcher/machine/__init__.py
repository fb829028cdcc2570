"""This computer: the trainer's Python, GPUs, processes, locks, git.

Nothing here knows a stage or a run.
"""
