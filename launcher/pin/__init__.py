"""Which checkouts and commits there are, and what another one would change.

Start with `pin.status` and `difference.between`.
"""
