// Device memory that belongs to no segment and lasts for one operation: the codec works in it.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "vmm.h"

namespace cumem_sleep {

// Mapped by the constructor, freed by `close`. Whole pages (2 MiB).
class Scratch {
  public:
    // The devices `peers` may access it, too. Throws DriverError, OutOfDeviceMemory.
    Scratch(int device, size_t bytes, const std::vector<int>& peers = {});
    ~Scratch() { close(); }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    // No work may use it any more. If the driver refuses twice, `reclaim_mappings` tries again.
    void close() noexcept;

    CUdeviceptr address() const { return address_; }
    size_t bytes() const { return bytes_; }

  private:
    std::unique_ptr<Mapping> mapping_;
    CUdeviceptr address_ = 0;
    const size_t bytes_;
};

// Calls `use` with the mapping of the scratch memory that `address` lies in, if any, and keeps it open meanwhile.
void with_scratch_at(CUdeviceptr address, const std::function<void(const Mapping&)>& use);

}  // namespace cumem_sleep
