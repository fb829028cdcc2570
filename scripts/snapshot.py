"""Write launcher/upstream/snapshots/*.json from a pinned checkout and the installed packages.

usage: python scripts/snapshot.py [CHECKOUT]

Needs the training extras: types such as `attn_implementation` live in ai2-olmo-core.
"""

import sys
from pathlib import Path

from launcher.pin import snapshot
from launcher.upstream.source.packages import find_package


def main(arguments: list[str]) -> int:
    """Take both snapshots; returns the exit code."""
    checkout = Path(arguments[0]).expanduser() if arguments else None
    for backend in ("open_instruct", "trl"):
        try:
            facts = snapshot.take(backend, checkout)
        except LookupError as error:
            print(error.args[0], file=sys.stderr)
            return 1
        version, missing = facts["version"], facts["unreadable"]
        if "+" in version or missing:
            print(f"{backend} at {version}: edited, or unreadable: {missing}", file=sys.stderr)
            return 1
        snapshot.write(backend, facts, checkout)
        print(f"{backend}: {len(facts['fields'])} fields at {version}")
    package = find_package("trl")
    if package is not None:
        templates = snapshot.templates_of(package)
        snapshot.write_templates(templates)
        print(f"trl: {len(templates)} chat templates that have one for training")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
