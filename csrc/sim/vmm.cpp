// Virtual memory management: address ranges, physical memory, and the mappings between them.
//
// A reservation is an anonymous mapping without access; physical memory is a memfd; mapping places the memfd over the
// reservation, still without access, until cuMemSetAccess grants it; unmapping puts the bare reservation back. So an
// address faults exactly when it would on a GPU.
#include "vmm.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <set>
#include <string>

#include "driver_call.h"
#include "process_board.h"

using namespace cumem_sim;

namespace {

void* host_address(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

bool is_multiple_of_granularity(std::uint64_t value) { return value % kGranularityBytes == 0; }

bool fits_address_space(CUdeviceptr address, std::size_t size) { return size > 0 && address + size > address; }

// Address space of `size` bytes without access. Null if there is none.
void* reserve(void* where, std::size_t size, int flags = 0) {
    void* address = mmap(where, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
    return address == MAP_FAILED ? nullptr : address;
}

// mmap aligns to host pages only: reserve more, and give back what lies outside the aligned range.
void* reserve_aligned(std::size_t size, std::size_t alignment) {
    if (size + alignment < size) return nullptr;
    auto* const start = static_cast<char*>(reserve(nullptr, size + alignment));
    if (!start) return nullptr;
    const std::uintptr_t misplaced = reinterpret_cast<std::uintptr_t>(start) % alignment;
    char* const aligned = start + (misplaced ? alignment - misplaced : 0);
    char* const end = start + size + alignment;
    if (aligned > start) munmap(start, static_cast<std::size_t>(aligned - start));
    if (end > aligned + size) munmap(aligned + size, static_cast<std::size_t>(end - aligned) - size);
    return aligned;
}

// The entry whose range holds `address`, in a table keyed by range start; end() if none.
template <typename Table, typename SizeOf>
auto find_range(Table& table, CUdeviceptr address, SizeOf size_of) {
    auto entry = table.upper_bound(address);
    if (entry == table.begin()) return table.end();
    --entry;
    return address - entry->first < size_of(entry->second) ? entry : table.end();
}

std::shared_ptr<Mapping> find_mapping(const Simulation& sim, CUdeviceptr address) {
    const auto entry = find_range(sim.mappings, address, [](const auto& mapping) { return mapping->size; });
    const bool found = entry != sim.mappings.end() && entry->second->alive;
    return found ? entry->second : nullptr;
}

bool overlaps_mapping(const Simulation& sim, CUdeviceptr address, std::size_t size) {
    const auto next = sim.mappings.lower_bound(address);
    const bool starts_inside = next != sim.mappings.end() && next->first < address + size;
    return starts_inside ||
           find_range(sim.mappings, address, [](const auto& m) { return m->size; }) != sim.mappings.end();
}

// Like mappings_of(), for calls that accept no part of a mapping.
std::vector<std::shared_ptr<Mapping>> whole_mappings_of(const Simulation& sim, CUdeviceptr address, std::size_t size) {
    auto mappings = mappings_of(sim, address, size);
    const Mapping& last = *mappings.back();
    require(mappings.front()->base == address && last.base + last.size == address + size, CUDA_ERROR_INVALID_VALUE);
    return mappings;
}

void check_location(Simulation& sim, const CUmemLocation& location) {
    require(number_of(location.type) == CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE);
    sim.device(location.id);
}

void check_properties(Simulation& sim, const CUmemAllocationProp* prop) {
    require(prop && number_of(prop->type) == CU_MEM_ALLOCATION_TYPE_PINNED, CUDA_ERROR_INVALID_VALUE);
    check_location(sim, prop->location);
}

int host_protection(const std::map<int, CUmemAccess_flags>& access) {
    int protection = PROT_NONE;
    for (const auto& [device, flags] : access) {
        if (flags & CU_MEM_ACCESS_FLAGS_PROT_READ) protection |= PROT_READ;
        if (flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) protection |= PROT_WRITE;
    }
    return protection;
}

void check_access(Simulation& sim, const CUmemAccessDesc& desc) {
    check_location(sim, desc.location);
    const int flags = number_of(desc.flags);
    const bool known = flags == CU_MEM_ACCESS_FLAGS_PROT_NONE || flags == CU_MEM_ACCESS_FLAGS_PROT_READ ||
                       flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    require(known, CUDA_ERROR_INVALID_VALUE);
}

// Identifies an exported descriptor: the memfd's name says which of the host's devices the memory is on.
std::string name_of_memory(int number) { return "cumem-sim-device-" + std::to_string(number); }

// The number of that device; -1 for any other descriptor.
int device_number_of(int fd) {
    char target[128] = "";
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    if (readlink(link.c_str(), target, sizeof target - 1) < 0) return -1;
    for (int number = 0; number < kMaxDevices; ++number)
        if (target == "/memfd:" + name_of_memory(number) + " (deleted)") return number;
    return -1;
}

// An import keeps a lock on the file for as long as it lives; that is how the process that created the memory sees it.
// Locks of this kind belong to an open file description, so each import needs its own.
struct flock import_lock(short type) {
    struct flock lock{};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_len = 1;
    return lock;
}

bool is_imported(int fd) {
    struct flock lock = import_lock(F_WRLCK);
    return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

ImportedFile open_import(int fd) {
    const int own = open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC);
    require(own >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    struct flock lock = import_lock(F_RDLCK);
    fcntl(own, F_OFD_SETLK, &lock);
    return {own};
}

Device& device_of_number(Simulation& sim, int number) {
    for (int ordinal = 0; ordinal < sim.settings.devices; ++ordinal)
        if (sim.device(ordinal).number == number) return sim.device(ordinal);
    throw Refused{CUDA_ERROR_NOT_SUPPORTED};  // a device that this process does not see
}

bool any_in_use(const std::vector<std::shared_ptr<Mapping>>& mappings) {
    return std::any_of(mappings.begin(), mappings.end(), [](const auto& mapping) { return mapping->users > 0; });
}

}  // namespace

namespace cumem_sim {

Physical::Physical(Device& device, std::size_t size, bool exportable)
    : device_(device),
      size_(size),
      exportable_(exportable),
      fd_(memfd_create(name_of_memory(device.number).c_str(), MFD_CLOEXEC)) {
    require(fd_ >= 0, errno == ENOMEM ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_OPERATING_SYSTEM);
    if (ftruncate(fd_, static_cast<off_t>(size)) != 0) {
        close(fd_);
        throw Refused{CUDA_ERROR_OUT_OF_MEMORY};
    }
    charge(device_, size_);
}

Physical::Physical(Device& device, std::size_t size, ImportedFile file)
    : device_(device), size_(size), exportable_(true), is_import_(true), fd_(file.fd) {}

Physical::~Physical() {
    if (!is_import_ && is_imported(fd_)) {
        device_.held_elsewhere.push_back({fd_, size_});
        return;
    }
    close(fd_);
    if (!is_import_) refund(device_, size_);
}

void charge(Device& device, std::uint64_t bytes) {
    device.used_bytes += bytes;
    publish(device);
}

void refund(Device& device, std::uint64_t bytes) {
    device.used_bytes -= bytes;
    publish(device);
}

std::uint64_t used_bytes(Device& device) {
    auto& held = device.held_elsewhere;
    const auto is_free = [&](const HeldElsewhere& memory) {
        if (is_imported(memory.fd)) return false;
        close(memory.fd);
        refund(device, memory.size);
        return true;
    };
    held.erase(std::remove_if(held.begin(), held.end(), is_free), held.end());
    return device.used_bytes;
}

// write() instead of a mapping: no page faults, and the source stays in the CPU's cache.
bool Physical::fill(unsigned char value) const {
    std::array<unsigned char, std::size_t{128} << 10> source;
    source.fill(value);
    for (std::size_t written = 0; written < size_;) {
        const std::size_t wanted = std::min(source.size(), size_ - written);
        const ssize_t count = pwrite(fd_, source.data(), wanted, static_cast<off_t>(written));
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return false;
        written += static_cast<std::size_t>(count);
    }
    return true;
}

std::vector<std::shared_ptr<Mapping>> mappings_of(const Simulation& sim, CUdeviceptr address, std::size_t size) {
    require(fits_address_space(address, size), CUDA_ERROR_INVALID_VALUE);
    std::vector<std::shared_ptr<Mapping>> mappings;
    for (CUdeviceptr covered = address; covered < address + size;) {
        auto mapping = find_mapping(sim, covered);
        require(mapping != nullptr, CUDA_ERROR_INVALID_VALUE);
        covered = mapping->base + mapping->size;
        mappings.push_back(std::move(mapping));
    }
    return mappings;
}

bool overlaps_reservation(const Simulation& sim, CUdeviceptr address, std::size_t size) {
    const auto next = sim.reservations.lower_bound(address);
    const bool starts_inside = next != sim.reservations.end() && next->first < address + size;
    return starts_inside ||
           find_range(sim.reservations, address, [](auto bytes) { return bytes; }) != sim.reservations.end();
}

void withdraw_device_memory(const Simulation& sim) {
    for (const auto& [address, size] : sim.reservations) reserve(host_address(address), size, MAP_FIXED);
}

}  // namespace cumem_sim

CUresult CUDAAPI cuMemGetAllocationGranularity(std::size_t* granularity, const CUmemAllocationProp* prop,
                                               CUmemAllocationGranularity_flags option) {
    return driver_call("cuMemGetAllocationGranularity", Needs::kInit, [&](Call& call) {
        const int wanted = number_of(option);
        const bool known = wanted == CU_MEM_ALLOC_GRANULARITY_MINIMUM || wanted == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        require(granularity && known, CUDA_ERROR_INVALID_VALUE);
        check_properties(call.sim, prop);
        *granularity = kGranularityBytes;
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* ptr, std::size_t size, std::size_t alignment, CUdeviceptr addr,
                                     unsigned long long flags) {
    return driver_call("cuMemAddressReserve", Needs::kInit, [&](Call& call) {
        require(ptr && size > 0 && is_multiple_of_granularity(size) && flags == 0, CUDA_ERROR_INVALID_VALUE);
        require((alignment & (alignment - 1)) == 0, CUDA_ERROR_INVALID_VALUE);
        const std::size_t boundary = std::max(alignment, kGranularityBytes);
        // The wanted address is a hint: if it is taken, any other will do.
        void* address = nullptr;
        if (addr && addr % boundary == 0) address = reserve(host_address(addr), size, MAP_FIXED_NOREPLACE);
        if (!address) address = reserve_aligned(size, boundary);
        require(address, CUDA_ERROR_OUT_OF_MEMORY);
        *ptr = reinterpret_cast<CUdeviceptr>(address);
        call.sim.reservations.emplace(*ptr, size);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr ptr, std::size_t size) {
    return driver_call("cuMemAddressFree", Needs::kInit, [&](Call& call) {
        const auto reservation = call.sim.reservations.find(ptr);
        const bool exact = reservation != call.sim.reservations.end() && reservation->second == size;
        require(exact && !overlaps_mapping(call.sim, ptr, size), CUDA_ERROR_INVALID_VALUE);
        require(munmap(host_address(ptr), size) == 0, CUDA_ERROR_OPERATING_SYSTEM);
        call.sim.reservations.erase(reservation);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t size, const CUmemAllocationProp* prop,
                             unsigned long long flags) {
    return driver_call("cuMemCreate", Needs::kInit, [&](Call& call) {
        require(handle && size > 0 && is_multiple_of_granularity(size) && flags == 0, CUDA_ERROR_INVALID_VALUE);
        check_properties(call.sim, prop);
        constexpr int kPosixFd = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        const int handle_types = number_of(prop->requestedHandleTypes);
        require(!(handle_types & CU_MEM_HANDLE_TYPE_FABRIC), CUDA_ERROR_NOT_PERMITTED);
        require(!(handle_types & ~kPosixFd), CUDA_ERROR_NOT_SUPPORTED);
        Device& device = call.sim.device(prop->location.id);
        const std::uint64_t limit = call.sim.settings.device_bytes;
        const std::uint64_t used = used_bytes(device);
        require(used <= limit && size <= limit - used, CUDA_ERROR_OUT_OF_MEMORY);

        auto physical = std::make_shared<Physical>(device, size, handle_types & kPosixFd);
        bool filled = false;
        {
            const Unlocked unlocked(call.lock);
            filled = physical->fill(0xDB);  // so that reads of unwritten memory show
        }
        require(filled, CUDA_ERROR_OUT_OF_MEMORY);
        *handle = call.sim.new_handle();
        call.sim.handles.emplace(*handle, std::move(physical));
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    return driver_call("cuMemRelease", Needs::kInit, [&](Call& call) {
        require(call.sim.handles.erase(handle) == 1, CUDA_ERROR_INVALID_VALUE);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemMap(CUdeviceptr ptr, std::size_t size, std::size_t offset, CUmemGenericAllocationHandle handle,
                          unsigned long long flags) {
    return driver_call("cuMemMap", Needs::kInit, [&](Call& call) {
        Simulation& sim = call.sim;
        const auto physical = sim.handles.find(handle);
        require(physical != sim.handles.end() && offset == 0 && flags == 0, CUDA_ERROR_INVALID_VALUE);
        require(size == physical->second->size() && is_multiple_of_granularity(ptr), CUDA_ERROR_INVALID_VALUE);
        const auto reservation = find_range(sim.reservations, ptr, [](std::size_t bytes) { return bytes; });
        require(reservation != sim.reservations.end(), CUDA_ERROR_INVALID_VALUE);
        require(size <= reservation->second - (ptr - reservation->first), CUDA_ERROR_INVALID_VALUE);
        require(!overlaps_mapping(sim, ptr, size), CUDA_ERROR_INVALID_VALUE);

        auto mapping = std::make_shared<Mapping>();
        mapping->base = ptr;
        mapping->size = size;
        mapping->physical = physical->second;
        void* const mapped =
            mmap(host_address(ptr), size, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->second->fd(), 0);
        require(mapped != MAP_FAILED, CUDA_ERROR_OPERATING_SYSTEM);
        sim.mappings.emplace(ptr, std::move(mapping));
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr ptr, std::size_t size) {
    return driver_call("cuMemUnmap", Needs::kInit, [&](Call& call) {
        const auto mappings = whole_mappings_of(call.sim, ptr, size);
        // A copy that is running now ends unharmed, but fails: it should have been waited for.
        for (const auto& mapping : mappings) mapping->alive = false;
        call.wait([&] { return !any_in_use(mappings); });
        if (!reserve(host_address(ptr), size, MAP_FIXED)) {
            for (const auto& mapping : mappings) mapping->alive = true;
            throw Refused{CUDA_ERROR_OPERATING_SYSTEM};
        }
        for (const auto& mapping : mappings) {
            mapping->physical.reset();  // enqueued copies may hold the mapping, but not the memory
            call.sim.mappings.erase(mapping->base);
        }
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr ptr, std::size_t size, const CUmemAccessDesc* desc, std::size_t count) {
    return driver_call("cuMemSetAccess", Needs::kInit, [&](Call& call) {
        require(desc && count > 0, CUDA_ERROR_INVALID_VALUE);
        std::set<int> devices;  // CUDA does not say what it does with one that is named twice
        for (std::size_t i = 0; i < count; ++i) {
            check_access(call.sim, desc[i]);
            require(devices.insert(desc[i].location.id).second, CUDA_ERROR_INVALID_VALUE);
        }
        auto mappings = whole_mappings_of(call.sim, ptr, size);
        while (any_in_use(mappings)) {
            call.wait([&] { return !any_in_use(mappings); });
            mappings = whole_mappings_of(call.sim, ptr, size);
        }
        for (const auto& mapping : mappings) {
            auto access = mapping->access;
            for (std::size_t i = 0; i < count; ++i) access[desc[i].location.id] = desc[i].flags;
            const int failed = mprotect(host_address(mapping->base), mapping->size, host_protection(access));
            require(!failed, CUDA_ERROR_OPERATING_SYSTEM);
            mapping->access = std::move(access);
        }
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr ptr) {
    return driver_call("cuMemGetAccess", Needs::kInit, [&](Call& call) {
        require(flags && location, CUDA_ERROR_INVALID_VALUE);
        check_location(call.sim, *location);
        const auto mapping = find_mapping(call.sim, ptr);
        require(mapping != nullptr, CUDA_ERROR_INVALID_VALUE);
        *flags = mapping->access_of(location->id);
        return CUDA_SUCCESS;
    });
}

// The file descriptor keeps the bytes, but is not counted: this library cannot see when it is closed.
CUresult CUDAAPI cuMemExportToShareableHandle(void* shareableHandle, CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType handleType, unsigned long long flags) {
    return driver_call("cuMemExportToShareableHandle", Needs::kInit, [&](Call& call) {
        const auto physical = call.sim.handles.find(handle);
        require(shareableHandle && flags == 0 && physical != call.sim.handles.end(), CUDA_ERROR_INVALID_VALUE);
        require(number_of(handleType) == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
        require(physical->second->exportable(), CUDA_ERROR_INVALID_VALUE);
        const int duplicate = fcntl(physical->second->fd(), F_DUPFD_CLOEXEC, 0);
        require(duplicate >= 0, CUDA_ERROR_OPERATING_SYSTEM);
        *static_cast<int*>(shareableHandle) = duplicate;
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* osHandle,
                                                CUmemAllocationHandleType shHandleType) {
    return driver_call("cuMemImportFromShareableHandle", Needs::kInit, [&](Call& call) {
        require(handle, CUDA_ERROR_INVALID_VALUE);
        require(number_of(shHandleType) == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CUDA_ERROR_NOT_SUPPORTED);
        const int fd = static_cast<int>(reinterpret_cast<std::intptr_t>(osHandle));
        const int number = device_number_of(fd);
        struct stat status{};
        require(number >= 0 && fstat(fd, &status) == 0 && status.st_size > 0, CUDA_ERROR_INVALID_VALUE);
        Device& device = device_of_number(call.sim, number);
        const auto size = static_cast<std::size_t>(status.st_size);
        auto physical = std::make_shared<Physical>(device, size, open_import(fd));
        *handle = call.sim.new_handle();
        call.sim.handles.emplace(*handle, std::move(physical));
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop,
                                                        CUmemGenericAllocationHandle handle) {
    return driver_call("cuMemGetAllocationPropertiesFromHandle", Needs::kInit, [&](Call& call) {
        const auto physical = call.sim.handles.find(handle);
        require(prop && physical != call.sim.handles.end(), CUDA_ERROR_INVALID_VALUE);
        *prop = CUmemAllocationProp{};
        prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
        prop->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        prop->location.id = physical->second->device().ordinal;
        const bool exportable = physical->second->exportable();
        prop->requestedHandleTypes = exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
        return CUDA_SUCCESS;
    });
}
