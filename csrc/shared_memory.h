// Device memory that another process may use: exported as a file descriptor by its owner, imported by the other one.
//
// A descriptor, a handle and a mapping each keep the physical memory, in every process: it goes back to the device only
// when all of them are gone. So whoever exports closes the descriptor as soon as it was sent, and whoever imports
// closes the import before its owner gives the memory up.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <memory>

#include "vmm.h"

namespace cumem_sleep {

struct ExportedMemory {
    int fd;            // the caller's to close; not inherited by programs that this process starts
    CUdeviceptr base;  // of the segment or scratch memory, all of which is exported
    size_t bytes;
};

// The physical memory under `address`, which lies in a mapped segment or in scratch memory. A free on another thread
// waits for it, an operation does not: whoever exports holds the lock of operations, or is the operation. Throws
// InvalidState if it lies in neither; DriverError, CUDA_ERROR_NOT_SUPPORTED among them where the host makes no memory
// that can be exported.
ExportedMemory export_memory(CUdeviceptr address);

// Physical memory of another process (or this one), mapped at an address of its own. Bytes are shared, not copied.
class ImportedMemory {
  public:
    // Leaves `fd` open. `bytes` is all of what was exported. Throws InvalidState for what cannot be right (a closed
    // descriptor, a size that is no multiple of the granularity, memory of another device), DriverError for what the
    // driver refuses; nothing is left behind then.
    ImportedMemory(int fd, int device, size_t bytes);
    ~ImportedMemory() { close(); }
    ImportedMemory(const ImportedMemory&) = delete;
    ImportedMemory& operator=(const ImportedMemory&) = delete;

    // No work may use it any more. What the driver refuses, twice, is tried again by `reclaim_mappings`. Closing again
    // does nothing.
    void close() noexcept;

    CUdeviceptr address() const { return address_; }
    size_t bytes() const { return bytes_; }
    int device() const { return device_; }

  private:
    const int device_;
    const size_t bytes_;
    std::unique_ptr<Mapping> mapping_;
    CUdeviceptr address_ = 0;
};

}  // namespace cumem_sleep
