"""One request, read and planned: everything that is decided before a start. Nothing here writes
into a run.

Start with `collect.collect`, then `check.plan_with_findings` and `prepare.complete`.
"""
