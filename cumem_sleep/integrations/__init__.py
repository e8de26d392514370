"""How other libraries allocate from this layer: one file a library."""
