// Copies of host memory by the GPU's processors instead of its copy engine.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace cumem_sleep {

// Each has 32 KiB in flight. Few, because mapping in the same process waits for wide launches
// (docs/decisions/copies.md).
constexpr unsigned int kCopyBlocks = 8;

// Begins to copy registered host memory to the device, in the order of the stream. Both addresses are multiples of 16;
// the bytes of `source` that exceed a multiple of 16 are left to the caller, who learns their number. The device's
// context is current. Throws DriverError.
size_t launch_copy(int device, CUdeviceptr target, const void* source, size_t bytes, unsigned int blocks,
                   CUstream stream);

// One of many copies. Addresses and bytes are multiples of 16; a table of these is in memory that kernels reach.
struct CopyPiece {
    uint64_t target, source, bytes, unused;
};

// Begins to make so many of them, in the order of the stream. The device's context is current. Throws DriverError.
void launch_copy_pieces(int device, const CopyPiece* pieces, uint64_t count, CUstream stream);

// Loads the kernel ahead of the first copy. Throws DriverError.
void load_copy_kernel(int device);

}  // namespace cumem_sleep
