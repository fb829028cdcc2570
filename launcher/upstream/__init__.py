"""All that is known of the trainers' source without importing it.

Start with `trainers.BACKENDS` (which there are), `locate` (where) and `schema` (what their parsers
take).
"""
