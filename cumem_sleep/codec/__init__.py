"""Compressed backups: the code, its kernels and their reference, and the encoding and decoding of segments."""
