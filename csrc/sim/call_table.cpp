#include "call_table.h"

#include <algorithm>

namespace cumem_sim {

namespace {

// Kept as strings: as identifiers, cuda.h would rename half of them.
constexpr const char* kCallNames[] = {
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGetProcAddress",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem",
    "cuDeviceGetPCIBusId",
    "cuDeviceCanAccessPeer",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxGetState",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuCtxGetDevice",
    "cuCtxSynchronize",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemGetInfo",
    "cuMemGetAllocationGranularity",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemGetAccess",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMemHostRegister",
    "cuMemHostUnregister",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyDtoDAsync",
    "cuMemsetD8Async",
    "cuMemsetD32Async",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuLaunchKernel",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy",
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuStreamBeginCapture",
    "cuStreamEndCapture",
    "cuGraphDestroy",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventCreate",
    "cuEventDestroy",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventQuery",
    "cuLaunchHostFunc",
    "cuPointerGetAttribute",
    "cuTensorMapEncodeTiled",
    "cuCheckpointProcessGetState",
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
};

}  // namespace

std::string without_version(const std::string& symbol) {
    const std::size_t digits = symbol.find_last_not_of("0123456789") + 1;
    const bool versioned = digits < symbol.size() && digits > 2 && symbol.compare(digits - 2, 2, "_v") == 0;
    return versioned ? symbol.substr(0, digits - 2) : symbol;
}

CallTable::CallTable() {
    for (const char* name : kCallNames) calls_.push_back(Entry{name, 0, {}});
}

int CallTable::find(const std::string& name) const {
    const std::string base = without_version(name);
    const auto entry = std::find_if(calls_.begin(), calls_.end(), [&](const Entry& e) { return base == e.name; });
    return entry == calls_.end() ? kUnknown : static_cast<int>(entry - calls_.begin());
}

void CallTable::add_failure(int index, std::uint64_t after, CUresult error, std::uint64_t times) {
    if (times > 0) calls_.at(static_cast<std::size_t>(index)).failures.push_back(Failure{after, error, times});
}

CUresult CallTable::take_failure(int index) {
    auto& failures = calls_.at(static_cast<std::size_t>(index)).failures;
    const auto due = std::find_if(failures.begin(), failures.end(), [](const Failure& f) { return !f.calls_before; });
    if (due == failures.end()) {
        for (Failure& failure : failures) --failure.calls_before;
        return CUDA_SUCCESS;
    }
    const CUresult error = due->error;
    if (--due->times_left == 0) failures.erase(due);
    return error;
}

void CallTable::reset() {
    for (Entry& entry : calls_) {
        entry.made = 0;
        entry.failures.clear();
    }
}

}  // namespace cumem_sim
