"""What one laboratory adds to launch: a rule for TRL's scripts, and a command."""

from collections.abc import Iterator

from launcher.cli.options import FORMAT, Format, answer, app
from launcher.errors import Exit, Finding
from launcher.rules.registry import register_rule
from launcher.rules.rule import say
from launcher.upstream.schema import Values


def unlucky_seed(values: Values) -> Iterator[Finding]:
    if values["seed"] == 13:
        yield say("error", "unlucky-seed", "seed", "`seed` is 13", layer="launch")


register_rule(unlucky_seed, "trl", "sft", "dpo")


@app.command(epilog="Example: launch house")
def house(format: Format = FORMAT) -> Exit:
    """Name the laboratory."""
    return answer("house", format, {"name": "Hilbert"}, ["Hilbert"])
