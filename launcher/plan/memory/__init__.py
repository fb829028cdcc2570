"""GiB a GPU by part and phase. Start with `peak.estimate`."""
