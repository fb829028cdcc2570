"""Several starts decided by each other's verdicts. Each folder is one command."""
