"""Which checkouts and commits there are, what another one would change, and how it becomes the pin.

Start with `pin.status`, `difference.between` and `move.move.move`.
"""
