#include "vmm.h"

#include <fcntl.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "descriptors.h"
#include "driver.h"
#include "waiting.h"

namespace cumem_sleep {

namespace {

std::mutex support_mutex;
auto* const support_by_device = new std::map<int, HandleSupport>;  // never destroyed: memory may be allocated at exit

std::mutex refused_mutex;
auto* const refused = new std::vector<std::unique_ptr<Mapping>>;  // never destroyed: memory may be given back at exit

bool destroyed(Mapping& mapping) noexcept {
    return try_twice([&] {
        ContextScope context(mapping.device());
        RelaxedCaptureScope relaxed;
        wait_for_work_left(mapping.device());
        for (const int peer : mapping.peers()) wait_for_work_left(peer);  // their copies reach it, too
        mapping.destroy();
        return true;
    });
}

bool attribute(int device, CUdevice_attribute which) {
    int value = 0;
    return Driver::get().device_get_attribute.attempt(&value, which, device) == CUDA_SUCCESS && value != 0;
}

HandleSupport advertised_support(int device) {
    if (!attribute(device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED))
        throw DriverError("cuDeviceGetAttribute", "CUDA_ERROR_NOT_SUPPORTED",
                          "device " + std::to_string(device) + " has no virtual memory management");
    HandleSupport support;
    if (attribute(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED))
        support.handle_types |= CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (attribute(device, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED))
        support.handle_types |= CU_MEM_HANDLE_TYPE_FABRIC;
    support.gpu_direct_rdma = attribute(device, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
    return support;
}

std::optional<HandleSupport> granted_support(int device) {
    std::lock_guard<std::mutex> lock(support_mutex);
    const auto found = support_by_device->find(device);
    if (found == support_by_device->end()) return std::nullopt;
    return found->second;
}

// Drops the next optional property after the driver refused; false if none is left.
bool reduce(HandleSupport& support) {
    if (support.handle_types & CU_MEM_HANDLE_TYPE_FABRIC) {
        support.handle_types &= ~static_cast<unsigned int>(CU_MEM_HANDLE_TYPE_FABRIC);
    } else if (support.gpu_direct_rdma) {
        support.gpu_direct_rdma = false;
    } else if (support.handle_types) {
        support.handle_types = 0;
    } else {
        return false;
    }
    return true;
}

bool is_refusal(CUresult result) {
    return result == CUDA_ERROR_NOT_PERMITTED || result == CUDA_ERROR_NOT_SUPPORTED ||
           result == CUDA_ERROR_INVALID_VALUE || result == CUDA_ERROR_INVALID_DEVICE;
}

CUmemLocation device_location(int device) {
    CUmemLocation location{};
    location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = device;
    return location;
}

CUmemAllocationProp allocation_prop(int device, const HandleSupport& support) {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = device_location(device);
    prop.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(support.handle_types);
    prop.allocFlags.gpuDirectRDMACapable = support.gpu_direct_rdma;
    return prop;
}

}  // namespace

size_t granularity(int device) {
    const CUmemAllocationProp prop = allocation_prop(device, {});
    size_t bytes = 0;
    Driver::get().mem_get_allocation_granularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    return bytes;
}

HandleSupport handle_support(int device) {
    const std::optional<HandleSupport> granted = granted_support(device);
    return granted ? *granted : advertised_support(device);
}

Mapping::Mapping(int device, size_t bytes, std::string kind) : device_(device), bytes_(bytes), kind_(std::move(kind)) {}

void Mapping::reserve() {
    if (state_ != State::kUnreserved) return;
    const Driver& driver = Driver::get();
    CUdeviceptr address = 0;
    const CUresult result = driver.mem_address_reserve.attempt(&address, bytes_, 0, 0, 0);
    if (result != CUDA_SUCCESS) driver.fail(driver.mem_address_reserve.name, result, describe());
    address_ = address;
    state_ = State::kUnmapped;
}

void Mapping::map() {
    const State before = state_;
    try {
        if (state_ == State::kUnmapped) create();
        if (state_ == State::kDetached) enter_range();
        if (state_ == State::kMappedWithoutAccess) set_access();
    } catch (const std::exception&) {
        return_to(before);
        throw;
    }
}

void Mapping::create() { adopt(new_handle()); }

void Mapping::enter_range() {
    const Driver& driver = Driver::get();
    const CUresult result = driver.mem_map.attempt(address_, bytes_, 0, handle_, 0);
    if (result != CUDA_SUCCESS) driver.fail(driver.mem_map.name, result, describe());
    state_ = State::kMappedWithoutAccess;
}

void Mapping::set_access() {
    const Driver& driver = Driver::get();
    std::vector<CUmemAccessDesc> access = peers_;
    access.push_back({device_location(device_), CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
    const CUresult result = driver.mem_set_access.attempt(address_, bytes_, access.data(), access.size());
    if (result != CUDA_SUCCESS) driver.fail(driver.mem_set_access.name, result, describe());
    state_ = State::kMapped;
}

// As far back as the driver lets it.
void Mapping::return_to(State before) noexcept {
    const auto undo = [this](void (Mapping::*step)()) {
        try_twice([&] {
            (this->*step)();
            return true;
        });
    };
    if (state_ == State::kMappedWithoutAccess && before < state_) undo(&Mapping::unmap);
    if (state_ == State::kDetached && before < state_) undo(&Mapping::release);
}

void Mapping::adopt(CUmemGenericAllocationHandle handle) noexcept {
    static std::atomic<uint64_t> last{0};
    handle_ = handle;
    memory_ = ++last;
    state_ = State::kDetached;
}

void Mapping::share_with(int peer) { peers_.push_back({device_location(peer), CU_MEM_ACCESS_FLAGS_PROT_READWRITE}); }

std::vector<int> Mapping::peers() const {
    std::vector<int> devices;
    for (const CUmemAccessDesc& peer : peers_) devices.push_back(peer.location.id);
    return devices;
}

int Mapping::export_fd() const {
    const auto& call = Driver::get().mem_export_to_shareable_handle;
    if (!(handle_support(device_).handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
        throw DriverError(call.name, "CUDA_ERROR_NOT_SUPPORTED",
                          "this host makes no device memory that can be exported as a file descriptor", describe());
    int fd = -1;
    const CUresult result = call.attempt(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result != CUDA_SUCCESS) fail_for_descriptors(call.name, result, describe());
    fcntl(fd, F_SETFD, FD_CLOEXEC);  // the driver does not document whether it sets this
    return fd;
}

void Mapping::detach() {
    if (state_ == State::kMapped) peers_ = peers_with_access();
    if (is_mapped()) unmap();
}

void Mapping::unmap() {
    const Driver& driver = Driver::get();
    const CUresult result = driver.mem_unmap.attempt(address_, bytes_);
    if (result != CUDA_SUCCESS) driver.fail(driver.mem_unmap.name, result, describe());
    state_ = State::kDetached;
}

void Mapping::release() {
    if (state_ != State::kDetached) return;
    const Driver& driver = Driver::get();
    const CUresult result = driver.mem_release.attempt(handle_);
    if (result != CUDA_SUCCESS) driver.fail(driver.mem_release.name, result, describe());
    handle_ = 0;
    memory_ = 0;
    state_ = State::kUnmapped;
}

void Mapping::destroy() {
    if (is_mapped()) unmap();
    release();
    if (state_ != State::kUnmapped) return;
    const Driver& driver = Driver::get();
    const CUresult result = driver.mem_address_free.attempt(address_, bytes_);
    if (result != CUDA_SUCCESS) driver.fail(driver.mem_address_free.name, result, describe());
    state_ = State::kUnreserved;
}

// Asks for the best handle that the device advertises, drops what the driver refuses, and remembers what it granted.
CUmemGenericAllocationHandle Mapping::new_handle() const {
    const Driver& driver = Driver::get();
    const std::optional<HandleSupport> granted = granted_support(device_);
    HandleSupport support = granted ? *granted : advertised_support(device_);
    for (;;) {
        const CUmemAllocationProp prop = allocation_prop(device_, support);
        CUmemGenericAllocationHandle handle = 0;
        const CUresult result = driver.mem_create.attempt(&handle, bytes_, &prop, 0);
        if (result == CUDA_SUCCESS) {
            std::lock_guard<std::mutex> lock(support_mutex);
            support_by_device->emplace(device_, support);
            return handle;
        }
        if (result == CUDA_ERROR_OUT_OF_MEMORY) {
            size_t free_bytes = 0, total_bytes = 0;
            driver.mem_get_info.attempt(&free_bytes, &total_bytes);
            throw OutOfDeviceMemory(device_, bytes_, free_bytes, describe());
        }
        if (granted || !is_refusal(result) || !reduce(support)) driver.fail(driver.mem_create.name, result, describe());
    }
}

const char* name_of(Mapping::State state) {
    switch (state) {
        case Mapping::State::kUnreserved:
            return "unreserved";
        case Mapping::State::kUnmapped:
            return "unmapped";
        case Mapping::State::kDetached:
            return "detached";
        case Mapping::State::kMappedWithoutAccess:
            return "mapped without access";
        case Mapping::State::kMapped:
            return "mapped";
    }
    return "?";
}

void give_back(std::unique_ptr<Mapping> mapping) noexcept {
    if (destroyed(*mapping)) return;
    std::lock_guard<std::mutex> lock(refused_mutex);
    refused->push_back(std::move(mapping));
}

size_t reclaim_mappings() noexcept {
    std::lock_guard<std::mutex> lock(refused_mutex);
    const auto gone = [](const std::unique_ptr<Mapping>& mapping) { return destroyed(*mapping); };
    refused->erase(std::remove_if(refused->begin(), refused->end(), gone), refused->end());
    return refused->size();
}

std::vector<CUmemAccessDesc> Mapping::peers_with_access() const {
    const Driver& driver = Driver::get();
    std::vector<CUmemAccessDesc> peers;
    const int devices = device_count();
    for (int peer = 0; peer < devices; ++peer) {
        if (peer == device_) continue;
        const CUmemLocation location = device_location(peer);
        unsigned long long flags = 0;
        const CUresult result = driver.mem_get_access.attempt(&flags, &location, address_);
        if (result != CUDA_SUCCESS) driver.fail(driver.mem_get_access.name, result, describe());
        if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) peers.push_back({location, static_cast<CUmemAccess_flags>(flags)});
    }
    return peers;
}

std::string Mapping::describe() const {
    char text[96];
    snprintf(text, sizeof text, " at 0x%llx (%zu bytes, device %d)", static_cast<unsigned long long>(address_), bytes_,
             device_);
    return kind_ + text;
}

}  // namespace cumem_sleep
