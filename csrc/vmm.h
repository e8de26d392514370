// One segment's physical life: reserve an address range, map and unmap physical memory in it, free the range. Nothing
// here knows about tags or policy.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace cumem_sleep {

// Every size and address on this device must be a multiple of this (2 MiB on today's GPUs).
size_t granularity(int device);

class Mapping {
  public:
    enum class State {
        kUnreserved,           // no address range yet, or freed
        kUnmapped,             // an address range, no physical memory
        kDetached,             // physical memory with its bytes, but not mapped: map() brings them back
        kMappedWithoutAccess,  // mapped, but every access faults: a failed map() may leave this
        kMapped,               // usable
    };

    // Makes no driver call. `bytes` is a multiple of the granularity; errors call the memory `kind`.
    Mapping(int device, size_t bytes, std::string kind = "segment");
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    // reserve, map, detach and release each take one step. If the driver refuses, they throw DriverError and change
    // nothing; if the step was taken already, they do nothing. Only map() takes several steps, those that are missing:
    // if the driver also refuses to undo one of them, the state reached stays, and calling map() again goes on from
    // there.
    void reserve();
    // From unmapped: new physical memory with undefined bytes. Otherwise the same memory and the same bytes. Every peer
    // that had access when the memory was last mapped gets it again. Throws OutOfDeviceMemory.
    void map();
    // From unmapped: takes ownership of the handle, which map() then maps.
    void adopt(CUmemGenericAllocationHandle handle) noexcept;
    // Once mapped, this device may access it, too.
    void share_with(int peer);
    // Devices that may have had access when it was last mapped.
    std::vector<int> peers() const;
    // Exports the physical memory as a file descriptor for another process to import; the caller closes it. The memory
    // must exist and stay meanwhile. Throws DriverError; InvalidState if no descriptor is left.
    int export_fd() const;
    // No kernel or copy may still use the range: the driver does not wait for it.
    void detach();
    void release();

    // Undoes every step taken. Throws if the driver refuses one; calling again goes on from there.
    void destroy();

    // Keeps its value after the range has been freed.
    CUdeviceptr address() const { return address_; }
    size_t bytes() const { return bytes_; }
    int device() const { return device_; }
    // This and the next three may be called while another thread takes a step.
    State state() const { return state_; }
    // Names the physical memory: no other, before or after it, has the same. 0: there is none.
    uint64_t memory() const { return memory_; }
    // Whether there is physical memory: mapped or detached.
    bool has_memory() const { return state_ >= State::kDetached; }
    bool is_mapped() const { return state_ >= State::kMappedWithoutAccess; }

  private:
    // The steps of map(), each from one state to the next, and of its way back.
    void create();
    void enter_range();
    void set_access();
    void unmap();
    void return_to(State before) noexcept;

    CUmemGenericAllocationHandle new_handle() const;
    std::vector<CUmemAccessDesc> peers_with_access() const;
    std::string describe() const;

    const int device_;
    const size_t bytes_;
    const std::string kind_;
    std::atomic<State> state_{State::kUnreserved};
    std::atomic<uint64_t> memory_{0};
    CUdeviceptr address_ = 0;
    CUmemGenericAllocationHandle handle_ = 0;
    std::vector<CUmemAccessDesc> peers_;
};

const char* name_of(Mapping::State state);

// Destroys a mapping that belongs to no segment and that nobody uses any more. If the driver refuses twice,
// `reclaim_mappings` tries again; that returns how many the driver still refuses.
void give_back(std::unique_ptr<Mapping> mapping) noexcept;
size_t reclaim_mappings() noexcept;

// What kinds of handles the device has granted so far, as CUmemAllocationHandleType bits, and whether they are
// GPUDirect-RDMA capable. Known only after the first allocation, because some hosts refuse what the attributes promise.
struct HandleSupport {
    unsigned int handle_types = 0;
    bool gpu_direct_rdma = false;
};
HandleSupport handle_support(int device);

}  // namespace cumem_sleep
