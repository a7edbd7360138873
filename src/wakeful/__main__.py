"""`python -m wakeful` is the command `wakeful`."""

import os
import sys

from wakeful.cli import main

status = main()
if os.environ.get("WORLD_SIZE", "1") != "1":
    # All is written by now. Threads of native libraries have been seen to abort an interpreter that
    # ends under torchrun, which then calls a run that is done a failure.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
sys.exit(status)
