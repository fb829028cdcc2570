"""One start from request to verdict. Start with `prepare.prepare`, then `start.begin`."""
