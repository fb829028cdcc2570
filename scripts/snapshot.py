"""Write launcher/snapshots/*.json from a pinned checkout and the installed packages.

usage: python scripts/snapshot.py [CHECKOUT]

Needs the training extras: types such as `attn_implementation` live in ai2-olmo-core.
"""

from __future__ import annotations

import sys
from pathlib import Path

from launcher.errors import LaunchError
from launcher.snapshots import taking


def main(arguments: list[str]) -> int:
    """Take both snapshots; returns the exit code."""
    checkout = Path(arguments[0]) if arguments else None
    for backend in ("open_instruct", "trl"):
        try:
            print("\n".join(taking.take(backend, checkout=checkout).lines()))
        except LaunchError as error:
            for finding in error.findings:
                print(f"{finding.message}\n  help: {finding.help}", file=sys.stderr)
            return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
