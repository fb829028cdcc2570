"""Python source read as text: dataclass fields, which code reads them, under which conditions.

Start with `reads`. The walk that it takes is one class in five steps, each adding to the one above
it: `lookup` (classes and modules), `branches` (tests as conditions), `expressions`, `calls` and
`statements`. They share `values` (what a name may hold), `record` (what was met), and `syntax`.
"""
