"""What the tests of level 3 share."""

from support import MIB

LEFT_AT_LEVEL_1 = 32 * MIB
LEFT_AT_LEVEL_3 = 4 * MIB
