// The simulated driver's own C interface, exported beside the cu* calls: limits, injected failures and statistics.
//
// A program can tell this library from a real libcuda by looking up `cumemSimConfigure`. Calls are named by their CUDA
// name without version suffix ("cuMemHostRegister"); a suffix ("cuMemHostRegister_v2") is accepted. Every function may
// be called at any time, from any thread, without cuInit, and also in a forked child.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

struct CumemSimStatistics {
    std::uint64_t live_handles;      // physical handles created and not yet released
    std::uint64_t mapped_bytes;      // address space with physical memory behind it
    std::uint64_t reserved_bytes;    // address space reserved, mapped or not
    std::uint64_t registered_bytes;  // host memory registered
    std::uint64_t blocked_calls;     // that had to wait because another process had locked this one
};

// Sets the memory of every device, and how many devices there are; 0 keeps the current value. A smaller device only
// refuses new memory. Returns non-zero, and changes nothing, for an impossible number of devices.
int cumemSimConfigure(std::uint64_t device_bytes, int devices);

// Sets the device memory that each context takes which is created from now on.
void cumemSimSetContextBytes(std::uint64_t context_bytes);

// Sets how long a context that is created from now on takes for each MiB of host memory that is registered.
void cumemSimSetContextTime(std::uint64_t us_per_mib);

// What a process uses of a device's memory, and how much that has, as NVML would tell: without a context, and of other
// processes too. `uuid` is 16 bytes. Returns a CUresult: CUDA_ERROR_INVALID_VALUE if there is no such process,
// CUDA_ERROR_NOT_INITIALIZED if it does not use this driver, CUDA_ERROR_NOT_PERMITTED if it is somebody else's,
// CUDA_ERROR_INVALID_DEVICE if it sees no such device.
int cumemSimProcessMemory(int pid, const unsigned char* uuid, std::uint64_t* used_bytes, std::uint64_t* total_bytes);

// Lets the next `after` calls of `call` through, then fails the following `times` with `error` (a CUresult). Rules add
// up: each counts the calls that no rule failed. A failed call has no effect. Returns non-zero for an unknown call or
// error.
int cumemSimFail(const char* call, std::uint64_t after, int error, std::uint64_t times);

// Forgets the rules, sets the call counts (of blocked calls too) to zero and clears the sticky errors of all contexts.
// Touches no memory.
void cumemSimReset(void);

void cumemSimStats(struct CumemSimStatistics* statistics);

// How many calls this library knows; `index` below runs from 0. Unknown indices: null, 0.
int cumemSimCallCount(void);
const char* cumemSimCallName(int index);
std::uint64_t cumemSimCallsMade(int index);

// "CUDA_ERROR_OUT_OF_MEMORY" -> 2; -1 if there is no such error.
int cumemSimErrorCode(const char* name);
}
#pragma GCC visibility pop
