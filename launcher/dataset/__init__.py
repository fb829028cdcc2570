"""Data sets as files: which files a stage reads, every row of them, and what is wrong with the
rows.

Start at `survey.look`. Rules turn what it saw into findings (`rules.data`, `rules.trl.data`).
"""
