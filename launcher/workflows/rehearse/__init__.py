"""The rehearsal: a stage's own training script on the CPU, with a tiny model and the run's first rows.

`ask` talks to the trainer's Python, where `server` and `inside/` run; `arguments` makes a stage harmless;
`further` finds rows of kinds that the first rows do not show;
`rehearsal` turns what was refused and seen into findings. Start reading at `rehearsal.rehearse`.
"""
