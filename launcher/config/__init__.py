"""YAML text and plain values, with the place of every key: read, inherit, override, interpolate.

Start with `load.load`. `keys` is the table of launch's own keys, `pipeline` reads pipeline files.
"""
