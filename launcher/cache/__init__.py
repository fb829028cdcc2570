"""What a run reads, by content: inputs, cache folders and their names, why one was hit or missed.

Start with `keys.derive`.
"""
