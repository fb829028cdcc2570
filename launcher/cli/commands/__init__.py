"""The command line, one module for each family of commands: each parses, calls, reports, exits.

Importing this registers all of them; whatever a command needs it imports when it is called.
"""

from launcher.cli.commands import configs, data, planning, runs, stages, trained  # noqa: F401 - registers
from launcher.cli.options import app

__all__ = ["app"]
