"""The command line: parse, call, render, exit code.

Start with `main`; each command is a function of `commands/`.
"""
