"""`launch bench`: settings side by side. Start with `bench.plan`."""
