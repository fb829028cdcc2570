"""Which checkouts and commits there are, what another one would change, and how it becomes the pin.

Start with `pin.read_status`, `difference.compare_commits` and `move.move.move`.
"""
