"""`python -m cumem_sleep` is the command `cumem-sleep`."""

import sys

from .cli import main

sys.exit(main())
