"""One start, from a plan to its verdict. Start with `start.begin`."""
