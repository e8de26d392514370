"""Who has which bytes where: the store, the limits on host memory, and one file a tier that keeps them."""
