"""`python -m wakeful` is the command `wakeful`."""

import os
import sys

from wakeful.cli import main

status = main()
if "WORLD_SIZE" in os.environ:
    from wakeful.runs.distributed import leave  # imports torch, which `--help` does without

    leave(status)
sys.exit(status)
