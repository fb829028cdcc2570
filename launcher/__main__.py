"""`launch`, and `python -m launcher`: who interrupts it while its commands are imported sees no traceback."""

import sys


def main() -> None:
    try:
        from launcher.cli import main
    except KeyboardInterrupt:
        from launcher.errors import Exit

        sys.exit(Exit.INTERRUPTED)
    main.main()


if __name__ == "__main__":
    main()
