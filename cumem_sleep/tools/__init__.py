"""The command line: demo, doctor and bench, and what they share."""
