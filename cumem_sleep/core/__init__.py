"""What every room builds on: segments, tags, pools, levels, the driver, and the one object of an operation."""
