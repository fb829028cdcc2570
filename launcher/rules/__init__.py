"""Generators from values or from a stage's context to findings, and their registry.

Start with `registry.apply`. A rule is a function with the upstream line in its docstring.
"""
