// One segment's physical life: an address range is reserved, physical memory comes and goes under it, the range is
// given back. Nothing here knows about tags or policy.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

namespace cumem_sleep {

// Bytes that every size and address must be a multiple of on this device (2 MiB on today's GPUs).
size_t granularity(int device);

class Mapping {
  public:
    enum class State {
        kUnreserved,           // no address yet, or given back
        kUnmapped,             // an address, no physical memory
        kDetached,             // physical memory with its bytes, but not under the address: map() brings them back
        kMappedWithoutAccess,  // under the address, but every access faults: what a refused map() may leave
        kMapped,               // usable
    };

    // No driver call is made. `bytes` is a multiple of the granularity; errors say what memory it is by `kind`.
    Mapping(int device, size_t bytes, std::string kind = "segment");
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    // Each of the four takes one step, throws DriverError if the driver refuses, and has then changed nothing; where
    // the step was taken already it does nothing. Only map() takes several, and where the driver also refuses to undo
    // one of them it leaves the state it came to: calling it again goes on from there.
    void reserve();
    // From unmapped: new physical memory with undefined bytes. Else the same memory, the same bytes. Every peer that
    // had access when it was last usable has it again. Throws OutOfDeviceMemory.
    void map();
    // From unmapped: the handle is this object's to release from now on, and what map() puts under the address.
    void adopt(CUmemGenericAllocationHandle handle) noexcept;
    // The physical memory, which must be there and stay meanwhile, as a file descriptor for another process to import;
    // the caller's to close. Throws DriverError, InvalidState if no descriptor can be had.
    int export_fd() const;
    // No kernel or copy may still use the range: the driver does not wait for them.
    void detach();
    void release();

    // Takes back every step there is to take back. If the driver refuses one, throws; calling again goes on from there.
    void destroy();

    // Stays what it was when the range has been given back.
    CUdeviceptr address() const { return address_; }
    size_t bytes() const { return bytes_; }
    int device() const { return device_; }
    // This and the next may be asked while another thread takes a step.
    State state() const { return state_; }
    // Physical memory is held: mapped or detached.
    bool has_memory() const { return state_ >= State::kDetached; }
    bool is_mapped() const { return state_ >= State::kMappedWithoutAccess; }

  private:
    CUmemGenericAllocationHandle create() const;
    void unmap();
    std::vector<CUmemAccessDesc> peers_with_access() const;
    void set_access() const;
    std::string describe() const;

    const int device_;
    const size_t bytes_;
    const std::string kind_;
    std::atomic<State> state_{State::kUnreserved};
    CUdeviceptr address_ = 0;
    CUmemGenericAllocationHandle handle_ = 0;
    std::vector<CUmemAccessDesc> peers_;
};

const char* name_of(Mapping::State state);

// For a mapping of no segment, which nobody uses any more: destroys it. What the driver refuses, twice, is tried again
// by `reclaim_mappings`, which returns how many it still refuses.
void give_back(std::unique_ptr<Mapping> mapping) noexcept;
size_t reclaim_mappings() noexcept;

// What kinds of handles the device gave so far, as CUmemAllocationHandleType bits, and whether they are GPUDirect-RDMA
// capable. Known only after the first allocation: attributes promise what some hosts then refuse.
struct HandleSupport {
    unsigned int handle_types = 0;
    bool gpu_direct_rdma = false;
};
HandleSupport handle_support(int device);

}  // namespace cumem_sleep
