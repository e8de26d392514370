#include "transfer.h"

#include "copy_kernel.h"
#include "driver.h"
#include "waiting.h"

namespace cumem_sleep {

CopyStream::CopyStream(int device) : device_(device) {
    ContextScope context(device_);
    Driver::get().stream_create(&stream_, CU_STREAM_NON_BLOCKING);
}

void CopyStream::close() noexcept {
    if (!stream_ || Driver::is_forked()) return;
    // Destroying a stream does not wait for its work, and the caller frees the memory next. So if the driver refuses to
    // wait for the stream, wait for the device, as a last resort in the way that invalidates captures.
    const auto waited = [this](auto&& wait) {
        return try_twice([&] {
            ContextScope context(device_);
            wait();
            return true;
        });
    };
    waited([this] { synchronize(); }) || waited([this] { wait_for_running_work(device_); }) ||
        waited([this] { cumem_sleep::synchronize(device_); });
    try_twice([this] {
        ContextScope context(device_);
        return Driver::get().stream_destroy.attempt(stream_) == CUDA_SUCCESS;
    });
    stream_ = nullptr;
}

void CopyStream::to_host(const HostBlock& block, size_t offset, CUdeviceptr address, size_t bytes) {
    uint8_t* const host = block.writable_part(offset, bytes);
    ContextScope context(device_);
    Driver::get().memcpy_dtoh_async(host, address, bytes, stream_);
}

void CopyStream::to_device(CUdeviceptr address, const HostBlock& block, size_t offset, size_t bytes) {
    const uint8_t* const host = block.part(offset, bytes);
    ContextScope context(device_);
    Driver::get().memcpy_htod_async(address, host, bytes, stream_);
}

void CopyStream::to_device_by_kernel(CUdeviceptr address, const HostBlock& block, size_t offset, size_t bytes) {
    const uint8_t* const host = block.part(offset, bytes);
    if (!block.pinned()) throw InvalidState("a kernel copies from host memory that is registered");
    if (address % 16 != 0 || reinterpret_cast<uintptr_t>(host) % 16 != 0)
        throw InvalidState("a kernel copies between addresses that are multiples of 16");
    ContextScope context(device_);
    const size_t rest = launch_copy(device_, address, host, bytes, stream_);
    if (rest) Driver::get().memcpy_htod_async(address + bytes - rest, host + bytes - rest, rest, stream_);
}

void CopyStream::fill(CUdeviceptr address, unsigned int word, size_t bytes) {
    ContextScope context(device_);
    Driver::get().memset_d32_async(address, word, bytes / 4, stream_);
}

void CopyStream::synchronize() {
    ContextScope context(device_);
    RelaxedCaptureScope relaxed;
    Driver::get().stream_synchronize(stream_);
}

bool CopyStream::query() const {
    ContextScope context(device_);
    RelaxedCaptureScope relaxed;
    const Driver& driver = Driver::get();
    const CUresult result = driver.stream_query.attempt(stream_);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY) driver.fail(driver.stream_query.name, result);
    return result == CUDA_SUCCESS;
}

}  // namespace cumem_sleep
