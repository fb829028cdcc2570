"""`launch prepare`: what needs no GPU, done beforehand."""
