"""How bytes get back to a device: in which batches, by which route, at which pace."""
