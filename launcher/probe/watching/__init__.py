"""The pieces of the probe, which runs inside every training process under the trainer's interpreter.

Standard library only, Python 3.10 and later. `probe.py`, the script beside this folder, loads it by its
place under a name of its own: no folder of ours becomes an import path of the training. So the pieces
name each other relatively, and all are loaded before upstream's script begins. Whatever fails in them is
noted in the record and never raised into training.
"""

from .probe import Probe
from .script import main

__all__ = ["Probe", "main"]
