// Copies of host memory by the GPU's processors instead of its copy engine, for a process without PyTorch and Triton.
#pragma once

#include <cuda.h>

#include <cstddef>

namespace cumem_sleep {

// Begins to copy registered host memory to the device, in the order of the stream. Both addresses are multiples of 16;
// the bytes of `source` that exceed a multiple of 16 are left to the caller, who learns their number. The device's
// context is current. Throws DriverError.
size_t launch_copy(int device, CUdeviceptr target, const void* source, size_t bytes, CUstream stream);

// Loads the kernel, which takes some milliseconds the first time. Throws DriverError.
void load_copy_kernel(int device);

}  // namespace cumem_sleep
