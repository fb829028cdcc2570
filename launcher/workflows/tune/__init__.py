"""`launch tune`: the fastest setting that trains the same. Start with `tune.prepare_tuning`."""
