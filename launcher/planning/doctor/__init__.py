"""Whether this machine can train a stage, and the commands that mend it. Start with `checks`."""
