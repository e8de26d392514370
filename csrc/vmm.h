// One segment's physical life: an address range is reserved, physical memory comes and goes under it, the range is
// given back. Nothing here knows about tags or policy.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <string>
#include <vector>

namespace cumem_sleep {

// Bytes that every size and address must be a multiple of on this device (2 MiB on today's GPUs).
size_t granularity(int device);

class Mapping {
  public:
    enum class State {
        kUnreserved,  // no address yet, or given back
        kUnmapped,    // an address, no physical memory
        kDetached,    // physical memory with its bytes, but not under the address: map() brings the same bytes back
        kMapped,      // usable
    };

    // No driver call is made. `bytes` is a multiple of the granularity.
    Mapping(int device, size_t bytes);
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    // Each of the four takes one step, throws DriverError if the driver refuses, and has then changed nothing; where
    // the step was taken already it does nothing.
    void reserve();
    // From unmapped: new physical memory with undefined bytes. From detached: the same memory, the same bytes. Every
    // peer that had access when it was last mapped has it again. Throws OutOfDeviceMemory.
    void map();
    // No kernel or copy may still use the range: the driver does not wait for them.
    void detach();
    void release();

    // Takes back every step there is to take back. If the driver refuses one, throws; calling again goes on from there.
    void destroy();

    CUdeviceptr address() const { return address_; }
    size_t bytes() const { return bytes_; }
    int device() const { return device_; }
    State state() const;
    // Physical memory is held: mapped or detached.
    bool has_memory() const { return handle_ != 0; }

  private:
    CUmemGenericAllocationHandle create() const;
    void undo_create() noexcept;
    std::vector<CUmemAccessDesc> peers_with_access() const;
    void set_access() const;
    std::string describe() const;

    const int device_;
    const size_t bytes_;
    CUdeviceptr address_ = 0;
    CUmemGenericAllocationHandle handle_ = 0;
    bool mapped_ = false;
    std::vector<CUmemAccessDesc> peers_;
};

// What kinds of handles the device gave so far, as CUmemAllocationHandleType bits, and whether they are GPUDirect-RDMA
// capable. Known only after the first allocation: attributes promise what some hosts then refuse.
struct HandleSupport {
    unsigned int handle_types = 0;
    bool gpu_direct_rdma = false;
};
HandleSupport handle_support(int device);

}  // namespace cumem_sleep
