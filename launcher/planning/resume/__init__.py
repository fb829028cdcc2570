"""What an earlier attempt left and what a resume makes of it. Start with `decision.decide`."""
