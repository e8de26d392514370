// Copies and fills (`touching.h`).
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "touching.h"

using namespace cumem_sim;

namespace {

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
