"""`launch pipeline`: stages in turn. Start with `pipeline.run`."""
