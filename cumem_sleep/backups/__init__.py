"""Backups and where they are stored: the store, the limits on host memory, and one file per tier."""
