"""Run `python -m speedlab.cli`: the command `speedlab`, for environments without a scripts folder."""

import sys

from speedlab.cli import main

sys.exit(main())
