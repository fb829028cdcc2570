"""One run on disk, in /proc, in a queue: folder, record, attempt, command, lock, batch script.

Start with `rundir.RunFolder`.
"""
