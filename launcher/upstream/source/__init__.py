"""Python source read as text: dataclass fields, which code reads them, under which conditions.

Start with `reads`.
"""
