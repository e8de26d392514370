// Device memory that another process may use: exported as a file descriptor by its owner, imported by the other one.
//
// A descriptor, a handle and a mapping each keep the physical memory alive, in every process: the device gets it back
// only when all of them are gone. So the exporting process closes the descriptor as soon as it is sent, and the
// importing process closes the import before the owner releases the memory.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "lent_memory.h"
#include "vmm.h"

namespace cumem_sleep {

struct ExportedMemory {
    int fd;            // the caller closes it; close-on-exec
    CUdeviceptr base;  // of the segment or scratch memory, which is exported as a whole
    size_t bytes;
};

// The physical memory under `address`, which lies in a mapped segment or in scratch memory. A free on another thread
// waits for the export, an operation does not: so the caller has the operation lock, or is the operation. Throws
// InvalidState if `address` lies in neither; DriverError, with CUDA_ERROR_NOT_SUPPORTED if this host cannot create
// exportable memory.
ExportedMemory export_memory(CUdeviceptr address);

// The same memory is about to be given to another process, which fills it or only reads it. Throws InvalidState as
// `export_memory`.
Loan lend_memory(CUdeviceptr address, bool filled);

// Physical memory of another process (or this one), mapped at a new address. The bytes are shared, not copied.
class ImportedMemory {
  public:
    // Leaves `fd` open. `bytes` is the full size of the export. Throws InvalidState for invalid arguments (a
    // closed descriptor, a size that is not a multiple of the granularity, memory of another device), DriverError if
    // the driver refuses; nothing is left behind then.
    ImportedMemory(int fd, int device, size_t bytes);
    ~ImportedMemory() { close(); }
    ImportedMemory(const ImportedMemory&) = delete;
    ImportedMemory& operator=(const ImportedMemory&) = delete;

    // No work may use it any more. If the driver refuses twice, `reclaim_mappings` tries again. Closing again does
    // nothing.
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
