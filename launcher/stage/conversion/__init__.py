"""What other people train with -> a stage file, for `launch init --from`.

Start with `convert.convert`. A source (`sources`: a YAML file, a shell script, a batch script of
Slurm) becomes `settings.SourceSetting`s; a tool's module in `tools` says what its names mean;
`ledger` holds what became of each: carried, or left out with the reason.
"""
