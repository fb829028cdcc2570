"""Models, data and checkpoints as files: read, counted, fingerprinted, found whole or broken.

Start with `fingerprint` (what a file holds) and `architecture` (what a config.json describes).
"""
