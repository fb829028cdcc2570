"""Ask for the lease of a folder once a line comes in, and hold it until another one comes.

usage: acquire_lease.py OUTPUT RUN
"""

import sys
from pathlib import Path

from launcher.errors import NotReady
from launcher.runs import lease

sys.stdin.readline()
try:
    print(lease.acquire(Path(sys.argv[1]), Path(sys.argv[2])).fence, flush=True)
except NotReady:
    print("refused", flush=True)
sys.stdin.readline()
