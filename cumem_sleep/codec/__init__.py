"""Compressed backups: the code, its kernels and their reference, and the work of encoding and decoding."""
