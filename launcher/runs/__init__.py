"""One run on disk, in /proc, in a queue. Start with `rundir.RunFolder`."""
