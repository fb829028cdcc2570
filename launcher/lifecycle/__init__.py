"""One start from request to verdict: prepare, start, supervise, follow, stop, conclude.

Start with `prepare.prepare`, then `start.begin`.
"""
