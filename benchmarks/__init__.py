"""What launch itself costs: `python -m benchmarks` measures all of it, each module one part."""
