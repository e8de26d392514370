"""`cumem-sleep demo`: weights sleep and wake, and every byte is compared with its source."""
