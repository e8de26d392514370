"""How bytes get to where backups are stored and back: lanes to memory, copies in flight, and who makes them."""
