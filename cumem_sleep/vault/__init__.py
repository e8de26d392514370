"""One process that owns the host's pinned memory and keeps backups for others: the service, and how to reach it."""
