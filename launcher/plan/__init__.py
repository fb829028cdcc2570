"""A stage and GPUs -> `Plan` -> command, and the memory and time that it takes.

Start with `derive.STEPS` and `plan.make`; `command.build` makes the command line.
"""
