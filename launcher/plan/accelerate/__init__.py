"""The accelerate config that every run starts from."""
