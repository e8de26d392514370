"""`cumem-sleep doctor`: is this machine ready for sleep mode, is it fast, and what to do where it is not."""
