// Work on a stream that touches memory: checked when it is enqueued, checked again when the stream reaches it.
//
// It takes a little longer than its bytes need (CUMEM_SLEEP_SIM_COPY_DELAY_US), so that a program that does not wait
// sees the old bytes. Memory that was taken away in between fails the context, as on a GPU. Registered host memory is
// touched while the program goes on; pageable memory before the call returns.
//
// The operating system's kernel copies between host and device, through the memfd behind the device address. So host
// memory that the program has unmapped (as at its exit, with copies in flight) gives an error, where memcpy, or the
// sanitizers' pwrite, would kill the process.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "driver_call.h"
#include "registration.h"
#include "simulation.h"
#include "streams.h"
#include "vmm.h"

namespace cumem_sim {

enum class Access { kRead, kWrite };

// The memory that one piece of work touches; while the work runs, it counts as a user of that memory.
class Footprint {
  public:
    explicit Footprint(const Context& context) : device_(context.device) {}

    void add_device_memory(const Simulation& sim, CUdeviceptr address, std::size_t size, Access access) {
        for (auto& mapping : mappings_of(sim, address, size)) {
            require(allows(*mapping, access), CUDA_ERROR_INVALID_VALUE);
            device_memory_.emplace_back(std::move(mapping), access);
        }
    }

    // Under unified addressing, a host address may be a device address.
    void add_host_memory(const Simulation& sim, const void* address, std::size_t size, Access access) {
        const auto device_address = reinterpret_cast<CUdeviceptr>(address);
        if (overlaps_reservation(sim, device_address, size)) {
            add_device_memory(sim, device_address, size, access);
        } else if (auto registration = find_registration(sim, address, size)) {
            require(access == Access::kRead || !registration->read_only, CUDA_ERROR_INVALID_VALUE);
            host_memory_.push_back(std::move(registration));
        } else {
            pageable_ = true;
        }
    }

    bool pageable() const { return pageable_; }

    bool intact() const {
        return std::all_of(device_memory_.begin(), device_memory_.end(),
                           [&](const auto& used) { return used.first->alive && allows(*used.first, used.second); }) &&
               std::all_of(host_memory_.begin(), host_memory_.end(), [](const auto& used) { return used->alive; });
    }

    void add_users(int count) const {
        for (const auto& used : device_memory_) used.first->users += count;
        for (const auto& used : host_memory_) used->users += count;
    }

  private:
    bool allows(const Mapping& mapping, Access access) const {
        const CUmemAccess_flags flags = mapping.access_of(device_);
        return flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ||
               (flags == CU_MEM_ACCESS_FLAGS_PROT_READ && access == Access::kRead);
    }

    int device_;
    std::vector<std::pair<std::shared_ptr<Mapping>, Access>> device_memory_;
    std::vector<std::shared_ptr<Registration>> host_memory_;
    bool pageable_ = false;
};

// `action` says whether it found all its memory.
template <typename Action>
CUresult touch_memory(Simulation& sim, Lock& lock, const Footprint& footprint, const Action& action) {
    const auto delay = std::chrono::microseconds(sim.settings.copy_delay_us);
    {
        const Unlocked unlocked(lock);
        std::this_thread::sleep_for(delay);
    }
    if (!footprint.intact()) return CUDA_ERROR_ILLEGAL_ADDRESS;
    footprint.add_users(1);
    bool found = false;
    {
        const Unlocked unlocked(lock);
        found = action();
    }
    footprint.add_users(-1);
    sim.progress.notify_all();
    return found && footprint.intact() ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

template <typename Action>
void enqueue_touching(Call& call, const std::shared_ptr<Stream>& stream, Footprint footprint, Action action) {
    const bool wait = footprint.pageable() && !stream->capture;
    Work work;
    work.run = [&sim = call.sim, footprint = std::move(footprint), action = std::move(action)](Lock& lock) {
        return touch_memory(sim, lock, footprint, action);
    };
    enqueue(call, stream, std::move(work));
    if (wait) synchronize(call, *stream);
}

// `transfer` moves bytes between host memory and a file, like pread and pwrite; this repeats it over all mappings.
template <typename Transfer>
bool transfer_all(const std::vector<std::shared_ptr<Mapping>>& mappings, CUdeviceptr device, std::size_t size,
                  Transfer transfer) {
    for (const auto& mapping : mappings) {
        const CUdeviceptr end = std::min(device + size, mapping->base + mapping->size);
        for (CUdeviceptr at = std::max(device, mapping->base); at < end;) {
            const auto offset = static_cast<off_t>(at - mapping->base);
            const long count = transfer(mapping->physical->fd(), at - device, end - at, offset);
            if (count < 0 && errno == EINTR) continue;
            if (count <= 0) return false;
            at += static_cast<std::size_t>(count);
        }
    }
    return true;
}

}  // namespace cumem_sim
