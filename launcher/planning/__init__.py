"""One request, read and planned: everything that is decided before a start, and nothing that begins one.

Start with `prepare.prepare`; nothing here writes.
"""
