// cuInit, versions, error names and symbol lookup: the calls that work before anything else does.
#include <dlfcn.h>

#include <cstdio>
#include <string>

#include "driver_call.h"
#include "error_names.h"
#include "process_board.h"
#include "simulation.h"
#include "vmm.h"

using namespace cumem_sim;

namespace {

void* this_library() {
    Dl_info info{};
    if (!dladdr(reinterpret_cast<void*>(&this_library), &info)) return nullptr;
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
}

// The newest version of a call, by its plain name.
void* find_symbol(const std::string& name) {
    void* library = this_library();
    if (!library) return nullptr;
    void* symbol = nullptr;
    for (const char* version : {"_v4", "_v3", "_v2", ""}) {
        if (!symbol) symbol = dlsym(library, (name + version).c_str());
    }
    dlclose(library);
    return symbol;
}

void leave_parent(const Simulation& sim) {
    withdraw_device_memory(sim);
    leave_board();
}

}  // namespace

CUresult CUDAAPI cuInit(unsigned int Flags) {
    return driver_call("cuInit", Needs::kUnlocked, [&](Call& call) {
        require(!call.sim.forked, CUDA_ERROR_NOT_INITIALIZED);
        require(Flags == 0, CUDA_ERROR_INVALID_VALUE);
        if (!call.sim.settings.error.empty()) {
            std::fprintf(stderr, "libcuda_sim: %s\n", call.sim.settings.error.c_str());
            return CUDA_ERROR_INVALID_VALUE;
        }
        make_board(call.sim);
        call.sim.leave_parent = leave_parent;
        call.sim.initialized = true;
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuDriverGetVersion(int* driverVersion) {
    return driver_call("cuDriverGetVersion", Needs::kNothing, [&](Call& call) {
        require(driverVersion, CUDA_ERROR_INVALID_VALUE);
        *driverVersion = call.sim.settings.driver_version;
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char** pStr) {
    return driver_call("cuGetErrorName", Needs::kNothing, [&](Call&) {
        require(pStr, CUDA_ERROR_INVALID_VALUE);
        *pStr = error_name(number_of(error));
        return *pStr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    });
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** pStr) {
    return driver_call("cuGetErrorString", Needs::kNothing, [&](Call&) {
        require(pStr, CUDA_ERROR_INVALID_VALUE);
        *pStr = error_string(number_of(error));
        return *pStr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    });
}

// Here every call has one version, and there are no per-thread default streams: `cudaVersion` and `flags` are ignored.
CUresult CUDAAPI cuGetProcAddress(const char* symbol, void** pfn, int cudaVersion, cuuint64_t flags,
                                  CUdriverProcAddressQueryResult* symbolStatus) {
    return driver_call("cuGetProcAddress", Needs::kUnlocked, [&](Call& call) {
        require(symbol && pfn && cudaVersion <= call.sim.settings.driver_version, CUDA_ERROR_INVALID_VALUE);
        require(flags <= CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, CUDA_ERROR_INVALID_VALUE);
        // Only names in the table: dlsym would also find symbols of the libraries that this one is linked to.
        const bool known = call.sim.calls.find(symbol) != CallTable::kUnknown;
        {
            // The dynamic loader has its own lock, and a constructor that it runs may be in a driver call.
            const Unlocked unlocked(call.lock);
            *pfn = known ? find_symbol(without_version(symbol)) : nullptr;
        }
        if (symbolStatus) *symbolStatus = *pfn ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        return CUDA_SUCCESS;
    });
}
