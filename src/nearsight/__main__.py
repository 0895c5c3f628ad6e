"""`python -m nearsight`: the same as the `nearsight` command."""

import sys

from nearsight.cli import main

sys.exit(main())
