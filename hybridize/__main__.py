"""`python -m hybridize` is the command `hybridize`."""

import sys

from hybridize.cli import main

sys.exit(main())
