// Device memory of no segment, for the length of one operation: what the codec works in.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <memory>

#include "vmm.h"

namespace cumem_sleep {

// Mapped when made, gone when closed. Whole pages (2 MiB).
class Scratch {
  public:
    // Throws DriverError, OutOfDeviceMemory.
    Scratch(int device, size_t bytes);
    ~Scratch() { close(); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    // No work may use it any more. What the driver refuses, twice, is tried again by `reclaim_scratch`.
    void close() noexcept;

    CUdeviceptr address() const { return address_; }
    size_t bytes() const { return bytes_; }

  private:
    std::unique_ptr<Mapping> mapping_;
    CUdeviceptr address_ = 0;
    const size_t bytes_;
};

// Tries again what the driver refused when it was closed. Returns how many it still refuses.
size_t reclaim_scratch() noexcept;

}  // namespace cumem_sleep
