"""Facts of the pinned sources as JSON, written by scripts/snapshot.py and read by `upstream`."""
