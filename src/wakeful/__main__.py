"""`python -m wakeful` is the command `wakeful`."""

import sys

from wakeful.cli import main

sys.exit(main())
