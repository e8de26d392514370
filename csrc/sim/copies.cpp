// Copies and fills: checked when they are enqueued, checked again when the stream reaches them.
//
// Each takes a little longer than the bytes need (CUMEM_SLEEP_SIM_COPY_DELAY_US), so that a program that does not wait
// sees the old bytes. Memory that was taken away in between fails the context, as on a GPU. Registered host memory is
// copied while the program goes on; pageable memory before the call returns.
//
// The operating system's kernel copies between host and device, through the memfd behind the device address. So host
// memory that the program has unmapped (as at its exit, with copies in flight) gives an error, where memcpy, or the
// sanitizers' pwrite, would kill the process.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "driver_call.h"
#include "registration.h"
#include "simulation.h"
#include "streams.h"
#include "vmm.h"

using namespace cumem_sim;

namespace {

enum class Access { kRead, kWrite };

constexpr char kCopyKernel[] = "cumem_sleep_copy";

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

template <typename Value>
CUresult fill(const char* name, CUdeviceptr address, Value value, std::size_t count, CUstream handle) {
    return driver_call(name, Needs::kContext, [&](Call& call) {
        const auto stream = stream_for_work(call, handle);
        require(address % sizeof(Value) == 0, CUDA_ERROR_INVALID_VALUE);
        require(count <= SIZE_MAX / sizeof(Value), CUDA_ERROR_INVALID_VALUE);
        if (count == 0) return CUDA_SUCCESS;
        Footprint footprint(*call.context);
        footprint.add_device_memory(call.sim, address, count * sizeof(Value), Access::kWrite);
        auto* const values = reinterpret_cast<Value*>(address);
        enqueue_touching(call, stream, std::move(footprint), [=] {
            std::fill_n(values, count, value);
            return true;
        });
        return CUDA_SUCCESS;
    });
}

}  // namespace

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr dstDevice, const void* srcHost, std::size_t ByteCount,
                                   CUstream hStream) {
    return driver_call("cuMemcpyHtoDAsync", Needs::kContext, [&](Call& call) {
        const auto stream = stream_for_work(call, hStream);
        if (ByteCount == 0) return CUDA_SUCCESS;
        Footprint footprint(*call.context);
        footprint.add_device_memory(call.sim, dstDevice, ByteCount, Access::kWrite);
        footprint.add_host_memory(call.sim, srcHost, ByteCount, Access::kRead);
        auto copy = [=, host = static_cast<const char*>(srcHost),
                     mappings = mappings_of(call.sim, dstDevice, ByteCount)] {
            return transfer_all(mappings, dstDevice, ByteCount,
                                [host](int file, std::size_t at, std::size_t size, off_t offset) {
                                    return syscall(SYS_pwrite64, file, host + at, size, offset);
                                });
        };
        enqueue_touching(call, stream, std::move(footprint), std::move(copy));
        return CUDA_SUCCESS;
    });
}

// The one kernel that there is: its PTX is not run, but known by its name.
CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
    return driver_call("cuModuleLoadData", Needs::kContext, [&](Call&) {
        require(module && image, CUDA_ERROR_INVALID_VALUE);
        require(std::strstr(static_cast<const char*>(image), kCopyKernel), CUDA_ERROR_INVALID_PTX);
        *module = reinterpret_cast<CUmodule>(const_cast<char*>(kCopyKernel));
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    return driver_call("cuModuleGetFunction", Needs::kContext, [&](Call&) {
        require(function && name && module == reinterpret_cast<CUmodule>(const_cast<char*>(kCopyKernel)),
                CUDA_ERROR_INVALID_VALUE);
        require(std::strcmp(name, kCopyKernel) == 0, CUDA_ERROR_NOT_FOUND);
        *function = reinterpret_cast<CUfunction>(module);
        return CUDA_SUCCESS;
    });
}

// Where a GPU would fault, because the host memory is not registered or an address not aligned, the work fails.
CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned int blocks, unsigned int blocks_y, unsigned int blocks_z,
                                unsigned int threads, unsigned int threads_y, unsigned int threads_z, unsigned int,
                                CUstream handle, void** arguments, void** extra) {
    return driver_call("cuLaunchKernel", Needs::kContext, [&](Call& call) {
        const auto stream = stream_for_work(call, handle);
        require(function == reinterpret_cast<CUfunction>(const_cast<char*>(kCopyKernel)), CUDA_ERROR_INVALID_HANDLE);
        require(arguments && !extra && blocks * blocks_y * blocks_z * threads * threads_y * threads_z > 0,
                CUDA_ERROR_INVALID_VALUE);
        const auto target = *static_cast<CUdeviceptr*>(arguments[0]);
        const auto source = *static_cast<const char**>(arguments[1]);
        const auto bytes = static_cast<std::size_t>(*static_cast<std::uint64_t*>(arguments[2]));
        Footprint footprint(*call.context);
        footprint.add_device_memory(call.sim, target, bytes, Access::kWrite);
        footprint.add_host_memory(call.sim, source, bytes, Access::kRead);
        const bool reaches =
            !footprint.pageable() && (target | reinterpret_cast<CUdeviceptr>(source) | bytes) % 16 == 0;
        auto copy = [=, mappings = mappings_of(call.sim, target, bytes)] {
            return reaches && transfer_all(mappings, target, bytes,
                                           [source](int file, std::size_t at, std::size_t size, off_t offset) {
                                               return syscall(SYS_pwrite64, file, source + at, size, offset);
                                           });
        };
        enqueue_touching(call, stream, std::move(footprint), std::move(copy));
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void* dstHost, CUdeviceptr srcDevice, std::size_t ByteCount, CUstream hStream) {
    return driver_call("cuMemcpyDtoHAsync", Needs::kContext, [&](Call& call) {
        const auto stream = stream_for_work(call, hStream);
        if (ByteCount == 0) return CUDA_SUCCESS;
        Footprint footprint(*call.context);
        footprint.add_device_memory(call.sim, srcDevice, ByteCount, Access::kRead);
        footprint.add_host_memory(call.sim, dstHost, ByteCount, Access::kWrite);
        auto copy = [=, host = static_cast<char*>(dstHost), mappings = mappings_of(call.sim, srcDevice, ByteCount)] {
            return transfer_all(mappings, srcDevice, ByteCount,
                                [host](int file, std::size_t at, std::size_t size, off_t offset) {
                                    return syscall(SYS_pread64, file, host + at, size, offset);
                                });
        };
        enqueue_touching(call, stream, std::move(footprint), std::move(copy));
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr dstDevice, CUdeviceptr srcDevice, std::size_t ByteCount,
                                   CUstream hStream) {
    return driver_call("cuMemcpyDtoDAsync", Needs::kContext, [&](Call& call) {
        const auto stream = stream_for_work(call, hStream);
        if (ByteCount == 0) return CUDA_SUCCESS;
        Footprint footprint(*call.context);
        footprint.add_device_memory(call.sim, dstDevice, ByteCount, Access::kWrite);
        footprint.add_device_memory(call.sim, srcDevice, ByteCount, Access::kRead);
        enqueue_touching(call, stream, std::move(footprint), [=] {
            std::memmove(reinterpret_cast<void*>(dstDevice), reinterpret_cast<const void*>(srcDevice), ByteCount);
            return true;
        });
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr dstDevice, unsigned char uc, std::size_t N, CUstream hStream) {
    return fill("cuMemsetD8Async", dstDevice, uc, N, hStream);
}

CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr dstDevice, unsigned int ui, std::size_t N, CUstream hStream) {
    return fill("cuMemsetD32Async", dstDevice, ui, N, hStream);
}
