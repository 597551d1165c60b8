"""`python -m trainkit.cli` is the command `trainkit`."""

import sys

from trainkit.cli.main import main

sys.exit(main())
