"""`python -m launcher.cli`: how jobs call it that were queued by earlier versions."""

from launcher.cli.main import main

main()
