"""Modes of torch_memory_saver, which make no difference here."""
