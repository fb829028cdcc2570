"""A stage's own training script on the CPU, with a tiny model and the run's first rows.

`arguments` makes a stage harmless; `ask` talks to the trainer's Python, where `server` and
`inside/` run; `attempts` asks until nothing is refused, `cause` and `remarks` make findings of it;
`local_data` has rows of kinds that the first rows do not show. Start reading at
`rehearsal.rehearse`.
"""
