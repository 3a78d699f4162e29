"""`python -m lapa2_interp`: the command `lapa2`."""

import sys

from lapa2_interp.cli.app import main

sys.exit(main())
