// Devices, what they can do, and their primary contexts; each thread has a stack of current contexts.
#include "devices.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>

#include "capture_rules.h"
#include "driver_call.h"
#include "process_board.h"
#include "registration.h"
#include "simulation.h"
#include "streams.h"
#include "vmm.h"

using namespace cumem_sim;

namespace {

int attribute(const Device& device, int attrib) {
    switch (attrib) {
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
        case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
            return 1;
        case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
            return Simulation::instance().settings.host_pointers;
        case CU_DEVICE_ATTRIBUTE_INTEGRATED:
            return Simulation::instance().settings.integrated;
        // Claimed on request although cuMemCreate refuses it, as on hosts whose GPUs support it but whose fabric is not
        // set up.
        case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
            return Simulation::instance().settings.claims_fabric;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
            return 9;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
        case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
            return 0;
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
            return device.number + 1;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
            return 132;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
            return 3;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
            return 32;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
            return 1024;
        case CU_DEVICE_ATTRIBUTE_NUMA_ID:
        case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
            return -1;
        default:
            return 0;
    }
}

CUresult write_uuid(const char* name, CUuuid* uuid, CUdevice dev) {
    return driver_call(name, Needs::kInit, [&](Call& call) {
        require(uuid, CUDA_ERROR_INVALID_VALUE);
        *uuid = uuid_of(call.sim.device(dev).number);
        return CUDA_SUCCESS;
    });
}

Context& find_context(Simulation& sim, CUcontext handle) {
    for (const auto& device : sim.devices) {
        if (device->primary.handle == handle) return device->primary;
    }
    throw Refused{CUDA_ERROR_INVALID_CONTEXT};
}

Context& live_context(Simulation& sim, CUcontext handle) {
    Context& context = find_context(sim, handle);
    require(context.retains > 0, CUDA_ERROR_CONTEXT_IS_DESTROYED);
    return context;
}

// As on H200s, where a new context first maps all registered memory, in 21 ms for each GiB (driver 580). Threads that
// want this context wait; others go on.
void map_registered_memory(Call& call, Context& context) {
    std::uint64_t bytes = 0;
    for (const auto& [base, registration] : call.sim.registrations) bytes += registration->size;
    const std::chrono::microseconds duration((bytes >> 20) * call.sim.settings.context_us_per_mib);
    if (duration.count() == 0) return;
    context.is_being_made = true;
    {
        const Unlocked unlocked(call.lock);
        std::this_thread::sleep_for(duration);
    }
    context.is_being_made = false;
    call.sim.progress.notify_all();
}

// A context takes memory of its own.
void create(Call& call, Device& device) {
    Simulation& sim = call.sim;
    map_registered_memory(call, device.primary);
    const std::uint64_t bytes = sim.settings.context_bytes;
    const std::uint64_t used = used_bytes(device);
    require(used <= sim.settings.device_bytes && bytes <= sim.settings.device_bytes - used, CUDA_ERROR_OUT_OF_MEMORY);
    device.primary.legacy = new_legacy_stream(sim, device.primary);
    device.primary.bytes = bytes;
    charge(device, bytes);
}

void destroy(Call& call, Context& context) {
    Simulation& sim = call.sim;
    refund(sim.device(context.device), std::exchange(context.bytes, 0));
    for (const auto& capture : std::vector<std::shared_ptr<Capture>>(sim.captures)) {
        if (&capture->streams.front()->context == &context) end_capture(sim, *capture);
    }
    for (const auto& stream : std::vector<std::shared_ptr<Stream>>(context.streams)) destroy_stream(sim, stream);
    for (auto event = sim.events.begin(); event != sim.events.end();) {
        event = event->second->context == &context ? sim.events.erase(event) : std::next(event);
    }
    context.legacy = nullptr;
    context.fault = CUDA_SUCCESS;
    unregister_all(call, context);
}

}  // namespace

CUuuid cumem_sim::uuid_of(int number) {
    CUuuid uuid{};
    std::snprintf(uuid.bytes, sizeof uuid.bytes, "cumem-sim-%05d", number);
    return uuid;
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
    return driver_call("cuDeviceGetCount", Needs::kInit, [&](Call& call) {
        require(count, CUDA_ERROR_INVALID_VALUE);
        *count = call.sim.settings.devices;
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
    return driver_call("cuDeviceGet", Needs::kInit, [&](Call& call) {
        require(device, CUDA_ERROR_INVALID_VALUE);
        *device = call.sim.device(ordinal).ordinal;
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuDeviceGetName(char* name, int len, CUdevice dev) {
    return driver_call("cuDeviceGetName", Needs::kInit, [&](Call& call) {
        require(name && len > 0, CUDA_ERROR_INVALID_VALUE);
        call.sim.device(dev);
        std::snprintf(name, static_cast<std::size_t>(len), "Simulated GPU");
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice dev) { return write_uuid("cuDeviceGetUuid", uuid, dev); }

// CUDA 13's header hides the first version, which programs built against CUDA 12 still call.
#undef cuDeviceGetUuid
extern "C" __attribute__((visibility("default"))) CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid, CUdevice dev) {
    return write_uuid("cuDeviceGetUuid", uuid, dev);
}

CUresult CUDAAPI cuDeviceGetAttribute(int* pi, CUdevice_attribute attrib, CUdevice dev) {
    return driver_call("cuDeviceGetAttribute", Needs::kInit, [&](Call& call) {
        require(pi, CUDA_ERROR_INVALID_VALUE);
        *pi = attribute(call.sim.device(dev), number_of(attrib));
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuDeviceTotalMem(std::size_t* bytes, CUdevice dev) {
    return driver_call("cuDeviceTotalMem", Needs::kInit, [&](Call& call) {
        require(bytes, CUDA_ERROR_INVALID_VALUE);
        call.sim.device(dev);
        *bytes = call.sim.settings.device_bytes;
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char* pciBusId, int len, CUdevice dev) {
    return driver_call("cuDeviceGetPCIBusId", Needs::kInit, [&](Call& call) {
        require(pciBusId && len > 0, CUDA_ERROR_INVALID_VALUE);
        std::snprintf(pciBusId, static_cast<std::size_t>(len), "0000:%02X:00.0", call.sim.device(dev).number + 1);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int* canAccessPeer, CUdevice dev, CUdevice peerDev) {
    return driver_call("cuDeviceCanAccessPeer", Needs::kInit, [&](Call& call) {
        require(canAccessPeer, CUDA_ERROR_INVALID_VALUE);
        *canAccessPeer = &call.sim.device(dev) != &call.sim.device(peerDev);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* pctx, CUdevice dev) {
    return driver_call("cuDevicePrimaryCtxRetain", Needs::kInit, [&](Call& call) {
        require(pctx, CUDA_ERROR_INVALID_VALUE);
        Device& device = call.sim.device(dev);
        call.wait([&] { return !device.primary.is_being_made; });
        if (device.primary.retains == 0) create(call, device);
        ++device.primary.retains;
        publish(device);
        *pctx = device.primary.handle;
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice dev) {
    return driver_call("cuDevicePrimaryCtxRelease", Needs::kInit, [&](Call& call) {
        Context& context = call.sim.device(dev).primary;
        // The last release destroys the context, which waits for its work.
        call.wait([&] { return context.retains != 1 || is_idle(context); });
        require(context.retains > 0, CUDA_ERROR_INVALID_CONTEXT);
        if (--context.retains == 0) destroy(call, context);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int* flags, int* active) {
    return driver_call("cuDevicePrimaryCtxGetState", Needs::kInit, [&](Call& call) {
        require(flags && active, CUDA_ERROR_INVALID_VALUE);
        *active = call.sim.device(dev).primary.retains > 0;
        *flags = 0;
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* pctx) {
    return driver_call("cuCtxGetCurrent", Needs::kInit, [&](Call&) {
        require(pctx, CUDA_ERROR_INVALID_VALUE);
        const auto& contexts = this_thread().contexts;
        *pctx = contexts.empty() ? nullptr : contexts.back()->handle;
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx) {
    return driver_call("cuCtxSetCurrent", Needs::kInit, [&](Call& call) {
        auto& contexts = this_thread().contexts;
        Context* context = ctx ? &live_context(call.sim, ctx) : nullptr;
        if (!contexts.empty()) contexts.pop_back();
        if (context) contexts.push_back(context);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext ctx) {
    return driver_call("cuCtxPushCurrent", Needs::kInit, [&](Call& call) {
        this_thread().contexts.push_back(&live_context(call.sim, ctx));
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext* pctx) {
    return driver_call("cuCtxPopCurrent", Needs::kInit, [&](Call&) {
        auto& contexts = this_thread().contexts;
        require(!contexts.empty(), CUDA_ERROR_INVALID_CONTEXT);
        if (pctx) *pctx = contexts.back()->handle;
        contexts.pop_back();
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice* device) {
    return driver_call("cuCtxGetDevice", Needs::kContext, [&](Call& call) {
        require(device, CUDA_ERROR_INVALID_VALUE);
        *device = call.context->device;
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuCtxSynchronize() {
    return driver_call("cuCtxSynchronize", Needs::kContext, [&](Call& call) {
        refuse_after_fault(*call.context);
        refuse_if_capturing(call.sim, *call.context);
        synchronize(call, *call.context);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuMemGetInfo(std::size_t* free, std::size_t* total) {
    return driver_call("cuMemGetInfo", Needs::kContext, [&](Call& call) {
        require(free && total, CUDA_ERROR_INVALID_VALUE);
        refuse_after_fault(*call.context);
        const std::uint64_t used = used_bytes(call.sim.device(call.context->device));
        *total = call.sim.settings.device_bytes;
        *free = used < *total ? *total - used : 0;
        return CUDA_SUCCESS;
    });
}
