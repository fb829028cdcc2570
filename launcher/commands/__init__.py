"""The command line, one module for each family of commands: each parses, calls, reports, exits.

Importing this registers all of them; whatever a command needs it imports when it is called.
"""

from launcher.commands import (  # noqa: F401 - what registers them
    caching,
    configs,
    judging,
    pins,
    pipeline,
    planning,
    rehearsing,
    running,
    stages,
    trials,
)
from launcher.commands.vocabulary import app

__all__ = ["app"]
