"""What other people train with -> a stage file, for `launch init --from`.

`convert.convert` is where to begin. A source (`sources`: a YAML file, a shell script, a batch script of Slurm's)
becomes `settings.SourceSetting`s; a tool's module in `tools` says what its names mean; `ledger` holds what became of
every one of them: carried, or left out with the reason.
"""
