"""How bytes are copied back to a device: in which batches, by which route, at which pace."""
