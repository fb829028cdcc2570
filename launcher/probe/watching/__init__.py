"""The probe, which runs inside every training process under the trainer's interpreter.

`run.py`, the script beside this folder, loads them by their place under a name of its own, so they
name each other relatively. Whatever fails in them is noted in the record and never raised into
training.
"""

from .probe import Probe
from .script import main

__all__ = ["Probe", "main"]
