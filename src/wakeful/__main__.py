"""`python -m wakeful` is the command `wakeful`."""

import os
import sys

from wakeful.cli import main

status = main()
if "WORLD_SIZE" in os.environ:
    from wakeful.runs.distributed import end_process  # imports torch, which `--help` does without

    end_process(status)
sys.exit(status)
