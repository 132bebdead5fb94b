"""`python -m speedlab.cli`: the command `speedlab`, where an environment has no scripts folder of its own."""

import sys

from speedlab.cli import main

sys.exit(main())
