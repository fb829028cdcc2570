"""`launch ladder`: 1, 2, 8 GPUs, gated. Start with `ladder.plan_rungs`."""
