"""Level 3: the CUDA state of this process leaves the GPU, and comes back, by CUDA's process checkpoint."""
