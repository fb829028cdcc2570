"""The command line, one module for each family of commands: each parses, calls, reports, exits.

A family is imported when one of its commands is asked for; whatever a command needs it imports when
it is called. `app` is the command line with every family.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from launcher.cli import options
from launcher.cli.help import App

if TYPE_CHECKING:
    from launcher.cli.options import app as app

FAMILIES = {
    "configs": "init configs validate-config explain schema pin",
    "data": "data",
    "planning": "plan doctor preview rehearse prepare ladder bench tune",
    "runs": "attach logs stop runs rm check report cache",
    "stages": "sft dpo exec pipeline",
    "trained": "chat merge card",
}
"""The modules of this package, and the commands of each."""


def build_app(name: str) -> App:
    """The command line with one command, or with all of them if no family has it."""
    for family, names in FAMILIES.items():
        if name in names.split():
            import_module(f"{__name__}.{family}")
            return options.app.narrowed(name)
    return _complete_app()


def _complete_app() -> App:
    for family in FAMILIES:
        import_module(f"{__name__}.{family}")
    return options.app


def __getattr__(name: str) -> App:
    if name != "app":
        raise AttributeError(name)
    return _complete_app()
