"""What the tests of level 3 share."""

from support import MIB

CONTEXT_BYTES = 32 * MIB  # of device memory, that a simulated context takes
