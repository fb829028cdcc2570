"""What the names of each tool mean: a function for each that settles every setting of a ledger."""
