"""The proof that bytes are the same: the digest, on the GPU and on the CPU."""
