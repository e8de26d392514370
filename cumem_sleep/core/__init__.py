"""What every other package builds on: segments, tags, pools, levels, the driver, and the one object of an operation."""
