// The digest of `cumem_sleep/digest/reference.py` on a GPU: the two sums of each chunk.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace cumem_sleep {

constexpr uint32_t kDigestChunkBytes = uint32_t{1} << 20;

// What a chunk is, and what becomes of it. Tables of both are in memory that kernels reach by its address.
struct DigestChunk {
    uint64_t address;  // of memory that kernels reach
    uint32_t number;   // within its content
    uint32_t bytes;    // at most `kDigestChunkBytes`; a multiple of 16, as is the address
};
struct DigestSums {
    uint64_t first, second;
};

// Begins to digest so many chunks, in the order of the stream. The device's context is current. Throws DriverError.
void launch_digest(int device, const DigestChunk* chunks, DigestSums* sums, size_t count, CUstream stream);

// Loads the kernel ahead of the first digest. Throws DriverError.
void load_digest_kernel(int device);

}  // namespace cumem_sleep
