#include "registration.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "capture_rules.h"
#include "streams.h"
#include "vmm.h"

using namespace cumem_sim;

namespace {

// Whether every page of the range is mapped in this process (mincore answers ENOMEM if not).
bool is_mapped_memory(std::uintptr_t address, std::size_t size) {
    static const std::size_t page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    std::array<unsigned char, 4096> resident;
    const std::uintptr_t end = address + size;
    for (std::uintptr_t page = address - address % page_bytes; page < end;) {
        const std::size_t bytes = std::min<std::size_t>(end - page, resident.size() * page_bytes);
        if (mincore(reinterpret_cast<void*>(page), bytes, resident.data()) != 0) return false;
        page += bytes;
    }
    return true;
}

bool populates_for_writing(void* page, std::size_t page_bytes) {
    constexpr int kPopulateWrite = 23;  // Linux 5.14; older C libraries do not name it
    return madvise(page, page_bytes, kPopulateWrite) == 0 || errno != EINVAL;
}

// Whether this process may write there, judged by the first page. True if the kernel cannot tell, because it is too old
// or a seccomp filter forbids the call; a page that is certainly writable shows that, because it is refused as well.
bool is_writable_memory(std::uintptr_t address) {
    static const auto page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    if (populates_for_writing(reinterpret_cast<void*>(address - address % page_bytes), page_bytes)) return true;
    char on_the_stack = 0;
    const auto writable = reinterpret_cast<std::uintptr_t>(&on_the_stack);
    return !populates_for_writing(reinterpret_cast<void*>(writable - writable % page_bytes), page_bytes);
}

// The first registration that shares a byte with the range.
std::shared_ptr<Registration> find_overlap(const Simulation& sim, std::uintptr_t address, std::size_t size) {
    auto next = sim.registrations.upper_bound(address);
    if (next != sim.registrations.begin()) {
        const auto& before = std::prev(next)->second;
        if (address - before->base < before->size) return before;
    }
    return next != sim.registrations.end() && next->first - address < size ? next->second : nullptr;
}

// A copy that is running now ends unharmed, but fails: it should have been waited for.
void unregister(Call& call, const std::shared_ptr<Registration>& registration) {
    registration->alive = false;
    call.wait([&] { return registration->users == 0; });
    if (call.sim.settings.integrated) refund(call.sim.device(registration->context->device), registration->size);
    call.sim.registrations.erase(registration->base);
}

// The real driver does not return before all running work of the context has ended (measured on an H200, driver 580).
// What went wrong in that work is for a later call to report.
void wait_for_context(Call& call) {
    try {
        synchronize(call, *call.context);
    } catch (const Refused&) {
    }
}

}  // namespace

namespace cumem_sim {

std::shared_ptr<Registration> find_registration(const Simulation& sim, const void* address, std::size_t size) {
    const auto base = reinterpret_cast<std::uintptr_t>(address);
    require(address && base + size > base, CUDA_ERROR_INVALID_VALUE);
    auto registration = find_overlap(sim, base, size);
    if (!registration) {
        require(is_mapped_memory(base, size), CUDA_ERROR_INVALID_VALUE);
        return nullptr;
    }
    const bool starts_inside = base >= registration->base;
    require(starts_inside && size <= registration->size - (base - registration->base), CUDA_ERROR_INVALID_VALUE);
    require(registration->alive, CUDA_ERROR_INVALID_VALUE);
    return registration;
}

void unregister_all(Call& call, const Context& context) {
    std::vector<std::shared_ptr<Registration>> registrations;
    for (const auto& [base, registration] : call.sim.registrations) {
        if (registration->context == &context && registration->alive) registrations.push_back(registration);
    }
    for (const auto& registration : registrations) unregister(call, registration);
}

}  // namespace cumem_sim

CUresult CUDAAPI cuMemHostRegister(void* p, std::size_t bytesize, unsigned int Flags) {
    return driver_call("cuMemHostRegister", Needs::kContext, [&](Call& call) {
        constexpr unsigned int kKnown = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
                                        CU_MEMHOSTREGISTER_IOMEMORY | CU_MEMHOSTREGISTER_READ_ONLY;
        const auto base = reinterpret_cast<std::uintptr_t>(p);
        require(p && base + bytesize > base && !(Flags & ~kKnown), CUDA_ERROR_INVALID_VALUE);
        refuse_if_unsafe_for_captures(call.sim);
        require(!find_overlap(call.sim, base, bytesize), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        require(is_mapped_memory(base, bytesize), CUDA_ERROR_INVALID_VALUE);
        require(!overlaps_reservation(call.sim, base, bytesize), CUDA_ERROR_INVALID_VALUE);
        const bool read_only = Flags & CU_MEMHOSTREGISTER_READ_ONLY;
        require(read_only || is_writable_memory(base), CUDA_ERROR_INVALID_VALUE);
        auto registration = std::make_shared<Registration>();
        registration->base = base;
        registration->size = bytesize;
        registration->read_only = read_only;
        registration->context = call.context;
        if (call.sim.settings.integrated) {
            Device& device = call.sim.device(call.context->device);
            const std::uint64_t used = used_bytes(device), limit = call.sim.settings.device_bytes;
            require(used <= limit && bytesize <= limit - used, CUDA_ERROR_OUT_OF_MEMORY);
            charge(device, bytesize);
        }
        call.sim.registrations.emplace(base, std::move(registration));
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemHostUnregister(void* p) {
    return driver_call("cuMemHostUnregister", Needs::kContext, [&](Call& call) {
        require(p, CUDA_ERROR_INVALID_VALUE);
        refuse_if_unsafe_for_captures(call.sim);
        const auto entry = call.sim.registrations.find(reinterpret_cast<std::uintptr_t>(p));
        const bool registered = entry != call.sim.registrations.end() && entry->second->alive;
        require(registered, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
        unregister(call, std::shared_ptr<Registration>(entry->second));
        wait_for_context(call);
        return CUDA_SUCCESS;
    });
}
