// Plain device memory (cuMemAlloc). This project uses it only to wait. Freeing waits for all running work of the
// context, and, unlike cuCtxSynchronize, leaves captures alone in a thread of relaxed capture mode (measured on an
// H200, driver 580). Copies to and from such memory are not supported.
#include <sys/mman.h>

#include <cstring>

#include "capture_rules.h"
#include "driver_call.h"
#include "simulation.h"
#include "streams.h"
#include "vmm.h"

using namespace cumem_sim;

CUresult CUDAAPI cuMemAlloc(CUdeviceptr* dptr, std::size_t bytesize) {
    return driver_call("cuMemAlloc", Needs::kContext, [&](Call& call) {
        require(dptr && bytesize > 0, CUDA_ERROR_INVALID_VALUE);
        refuse_after_fault(*call.context);
        refuse_if_unsafe_for_captures(call.sim);
        Device& device = call.sim.device(call.context->device);
        const std::uint64_t limit = call.sim.settings.device_bytes;
        const std::uint64_t used = used_bytes(device);
        require(used <= limit && bytesize <= limit - used, CUDA_ERROR_OUT_OF_MEMORY);
        const std::size_t size = (bytesize + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
        require(size >= bytesize && size <= limit - used, CUDA_ERROR_OUT_OF_MEMORY);
        void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        require(memory != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
        std::memset(memory, 0xDB, bytesize);
        *dptr = reinterpret_cast<CUdeviceptr>(memory);
        call.sim.allocations.emplace(*dptr, Allocation{&device, size});
        charge(device, size);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemFree(CUdeviceptr dptr) {
    return driver_call("cuMemFree", Needs::kContext, [&](Call& call) {
        if (dptr == 0) return CUDA_SUCCESS;
        require(call.sim.allocations.count(dptr) == 1, CUDA_ERROR_INVALID_VALUE);
        refuse_if_unsafe_for_captures(call.sim);
        synchronize(call, *call.context);
        const auto allocation = call.sim.allocations.find(dptr);  // another thread may have freed it in the meantime
        require(allocation != call.sim.allocations.end(), CUDA_ERROR_INVALID_VALUE);
        munmap(reinterpret_cast<void*>(dptr), allocation->second.size);
        refund(*allocation->second.device, allocation->second.size);
        call.sim.allocations.erase(allocation);
        return CUDA_SUCCESS;
    });
}
