#include "shared_memory.h"

#include <fcntl.h>

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>

#include "allocator.h"
#include "descriptors.h"
#include "driver.h"
#include "scopes.h"
#include "scratch.h"

namespace cumem_sleep {

namespace {

constexpr CUmemAllocationHandleType kPosixFd = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

std::string hexadecimal(CUdeviceptr address) {
    char text[32];
    snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
    return text;
}

ExportedMemory exported(const Mapping& mapping) {
    ContextScope context(mapping.device());
    return {mapping.export_fd(), mapping.address(), mapping.bytes()};
}

// What `use` returns of the mapping that `address` lies in.
template <typename Use>
auto of_memory_at(CUdeviceptr address, Use use) {
    if (const SegmentPtr segment = SegmentTable::get().find(address)) {
        const HeldSegments held({segment});
        if (!held.segments().empty()) {  // not freed in the meantime
            if (!segment->mapping.is_mapped())
                throw InvalidState("the segment at " + hexadecimal(segment->mapping.address()) +
                                   " has no memory to export while it is asleep: export it before it is unmapped");
            return use(segment->mapping);
        }
    }
    std::optional<decltype(use(std::declval<const Mapping&>()))> of_scratch;
    with_scratch_at(address, [&](const Mapping& mapping) { of_scratch = use(mapping); });
    if (of_scratch) return *of_scratch;
    throw InvalidState(hexadecimal(address) +
                       " is not in memory of this layer (already freed, or never allocated here)");
}

std::string describe(int fd) { return "memory of file descriptor " + std::to_string(fd); }

void check_arguments(int fd, int device, size_t bytes) {
    check_device(device);
    check_descriptor(fd);
    const size_t multiple = granularity(device);
    if (bytes == 0 || bytes % multiple != 0)
        throw InvalidState("bytes=" + std::to_string(bytes) + ": device memory comes in multiples of " +
                           std::to_string(multiple) + " bytes on device " + std::to_string(device));
}

CUmemGenericAllocationHandle import_handle(int fd) {
    const auto& call = Driver::get().mem_import_from_shareable_handle;
    CUmemGenericAllocationHandle handle = 0;
    const CUresult result = call.attempt(&handle, reinterpret_cast<void*>(static_cast<uintptr_t>(fd)), kPosixFd);
    if (result != CUDA_SUCCESS) fail_for_descriptors(call.name, result, describe(fd));
    return handle;
}

// Where the two devices are peers, mapping the other one's memory would work, but copies would take an unintended
// route.
void check_is_of(int device, CUmemGenericAllocationHandle handle, int fd) {
    CUmemAllocationProp prop{};
    Driver::get().mem_get_allocation_properties_from_handle(&prop, handle);
    if (prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE || prop.location.id != device)
        throw InvalidState("fd=" + std::to_string(fd) + ": its memory is on device " +
                           std::to_string(prop.location.id) + ", not on device " + std::to_string(device));
}

}  // namespace

ExportedMemory export_memory(CUdeviceptr address) { return of_memory_at(address, &exported); }

Loan lend_memory(CUdeviceptr address, bool filled) {
    return of_memory_at(address, [=](const Mapping& mapping) { return Loan(mapping.memory(), filled); });
}

ImportedMemory::ImportedMemory(int fd, int device, size_t bytes) : device_(device), bytes_(bytes) {
    check_arguments(fd, device, bytes);
    mapping_ = std::make_unique<Mapping>(device, bytes, describe(fd));
    try {
        ContextScope context(device);
        RelaxedCaptureScope relaxed;
        mapping_->reserve();
        const CUmemGenericAllocationHandle handle = import_handle(fd);
        mapping_->adopt(handle);
        check_is_of(device, handle, fd);
        mapping_->map();
        address_ = mapping_->address();
    } catch (...) {
        close();
        throw;
    }
}

void ImportedMemory::close() noexcept {
    if (Driver::is_forked() || !mapping_) return;
    give_back(std::move(mapping_));
}

}  // namespace cumem_sleep
