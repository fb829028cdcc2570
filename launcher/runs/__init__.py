"""One run on disk, in /proc, in a queue: folder, record, attempt, lock, job. Start with `rundir.RunFolder`."""
