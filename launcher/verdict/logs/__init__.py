"""Logs of any size: segments, survey, meaning. Start with `scan`."""
