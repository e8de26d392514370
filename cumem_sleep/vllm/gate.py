"""Stand-in until the gate is merged."""


class SleepGate:
    """Stand-in."""
