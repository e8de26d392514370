// Every call that this project makes into the CUDA driver, in one table, with its preconditions; typed errors.
//
// libcuda is opened at run time (nothing links against it), so the package builds and imports anywhere, and the
// simulated driver of csrc/sim can stand in for it.
#pragma once

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#if CUDA_VERSION < 12080
#error \
    "these headers are older than CUDA 12.8 and lack its calls for process checkpoints: pip install nvidia-cuda-runtime"
#endif

namespace cumem_sleep {

// A driver call failed. `call` and `error` are CUDA's own names; `segment` says which memory it was about, or is empty.
class DriverError : public std::runtime_error {
  public:
    DriverError(std::string call, std::string error, std::string detail = {}, std::string segment = {});

    std::string call, error, detail, segment;
};

// cuMemCreate found too little free device memory.
class OutOfDeviceMemory : public DriverError {
  public:
    OutOfDeviceMemory(int device, size_t needed_bytes, size_t free_bytes, std::string segment);

    int device;
    size_t needed_bytes, free_bytes;
};

// The call is not possible in the present state: no driver opened, a forked child, an address that is not ours.
class InvalidState : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// While the CUDA state of this process is checkpointed (level 3), a driver call would wait until another process
// restores it, and whoever asks for that must not wait. So calls are suspended before: all of them fail at once then.
//
// Waits until no call runs, and returns whether they are suspended; after `at_most` it leaves all as it was.
bool suspend_driver_calls(std::chrono::nanoseconds at_most);
void resume_driver_calls();
bool driver_calls_suspended() noexcept;

// Around driver calls, not only of this layer: they are not suspended meanwhile, and `allowed` says if they are
// already. Nests on a thread.
class DriverCalls {
  public:
    DriverCalls() noexcept;
    ~DriverCalls();
    DriverCalls(const DriverCalls&) = delete;
    DriverCalls& operator=(const DriverCalls&) = delete;

    bool allowed() const { return allowed_; }

  private:
    bool allowed_;
};

// The same for a scope of Python's, which may end on another thread than it began on, in any order with others.
class ScopeOfDriverCalls {
  public:
    // `is_lease`: it counts in `driver_is_leased`.
    explicit ScopeOfDriverCalls(bool is_lease) : is_lease_(is_lease) {}
    ~ScopeOfDriverCalls() { leave(); }
    ScopeOfDriverCalls(const ScopeOfDriverCalls&) = delete;
    ScopeOfDriverCalls& operator=(const ScopeOfDriverCalls&) = delete;

    // Whether calls are allowed. They are for the calling thread from then on, until `leave`.
    bool enter();
    void leave();

  private:
    const bool is_lease_;
    std::shared_ptr<std::atomic<int>> entered_;  // the count of the thread that entered it; null: nobody is inside
};

// Whether any lease is open.
bool driver_is_leased() noexcept;

// A shared object that is open as long as the process lives. Throws DriverError.
class Library {
  public:
    explicit Library(const std::string& its_path);
    // The address of a symbol; the first returns null, the second throws, if there is none.
    void* find(const char* symbol) const noexcept;
    void* need(const char* symbol) const;

    const std::string path;

  private:
    void* const handle_;
};

struct OldDriversLackIt {};

// One driver call. Calling it throws DriverError unless CUDA_SUCCESS comes back, and InvalidState while calls are
// suspended; `attempt`, which answers CUDA_ERROR_NOT_PERMITTED then, is for destructors and for callers that handle the
// result. `symbol` is the exported name, `name` the documented one.
template <typename Function>
class Call;

template <typename... Args>
class Call<CUresult(Args...)> {
  public:
    Call(const Library& library, const char* call_name, const char* symbol)
        : name(call_name), function_(reinterpret_cast<Function>(library.need(symbol))) {}
    Call(const Library& library, const char* call_name) : Call(library, call_name, call_name) {}
    Call(const Library& library, const char* call_name, OldDriversLackIt)
        : name(call_name), function_(reinterpret_cast<Function>(library.find(call_name))) {}

    void operator()(Args... args) const;
    CUresult attempt(Args... args) const {
        const DriverCalls calls;
        return calls.allowed() ? function_(args...) : CUDA_ERROR_NOT_PERMITTED;
    }
    // False only for a call that older drivers lack; it must not be called then.
    bool found() const { return function_ != nullptr; }

    const char* const name;

  private:
    using Function = CUresult (*)(Args...);
    const Function function_;
};

// The driver of this process. Opened once; never closed, because memory may be freed while the process exits.
class Driver {
  public:
    // Opens the shared object `path` (e.g. "libcuda.so.1") and initialises it. Opening the same path again does
    // nothing; another path throws InvalidState. Throws DriverError: not found, a call is missing, too old, cuInit
    // failed.
    static void open(const std::string& path);
    // The open driver. Throws InvalidState when none was opened, or in a forked child (CUDA does not survive a fork).
    static const Driver& get();
    // True once `open` succeeded, in this process or in the parent that it was forked from.
    static bool is_open() noexcept;
    // True in a child forked after `open`: no driver call may be made, no memory of the parent given back.
    static bool is_forked() noexcept;

    const std::string& path() const { return library_.path; }
    int version() const { return version_; }
    // True if the library identifies itself as the simulated driver, whatever its file is called.
    bool simulated() const { return simulated_; }
    std::string error_name(CUresult result) const;
    [[noreturn]] void fail(const char* call, CUresult result, const std::string& segment = {}) const;
    [[noreturn]] static void fail_suspended(const char* call);

  private:
    const Library library_;

  public:
    // Before everything else. Those for the version come first, because an old driver lacks some of the others.
    Call<decltype(cuDriverGetVersion)> driver_get_version{library_, "cuDriverGetVersion"};
    Call<decltype(cuGetErrorName)> get_error_name{library_, "cuGetErrorName"};
    Call<decltype(cuGetErrorString)> get_error_string{library_, "cuGetErrorString"};

  private:
    const int version_ = supported_version();

  public:
    // Once per process.
    Call<decltype(cuInit)> init{library_, "cuInit"};

    // Devices: an ordinal below cuDeviceGetCount is also the CUdevice handle.
    Call<decltype(cuDeviceGetCount)> device_get_count{library_, "cuDeviceGetCount"};
    Call<decltype(cuDeviceGetName)> device_get_name{library_, "cuDeviceGetName"};
    Call<decltype(cuDeviceGetUuid)> device_get_uuid{library_, "cuDeviceGetUuid", "cuDeviceGetUuid_v2"};
    Call<decltype(cuDeviceCanAccessPeer)> device_can_access_peer{library_, "cuDeviceCanAccessPeer"};
    Call<decltype(cuDeviceGetAttribute)> device_get_attribute{library_, "cuDeviceGetAttribute"};
    Call<decltype(cuDeviceTotalMem)> device_total_mem{library_, "cuDeviceTotalMem", "cuDeviceTotalMem_v2"};
    Call<decltype(cuDeviceGetPCIBusId)> device_get_pci_bus_id{library_, "cuDeviceGetPCIBusId"};

    // Contexts. Retaining the primary context creates it if needed (0.5 GiB of device memory on an H200). Push and pop
    // must pair up on one thread.
    Call<decltype(cuDevicePrimaryCtxRetain)> primary_ctx_retain{library_, "cuDevicePrimaryCtxRetain"};
    Call<decltype(cuCtxGetCurrent)> ctx_get_current{library_, "cuCtxGetCurrent"};
    Call<decltype(cuCtxSetCurrent)> ctx_set_current{library_, "cuCtxSetCurrent"};
    Call<decltype(cuCtxPushCurrent)> ctx_push_current{library_, "cuCtxPushCurrent", "cuCtxPushCurrent_v2"};
    Call<decltype(cuCtxPopCurrent)> ctx_pop_current{library_, "cuCtxPopCurrent", "cuCtxPopCurrent_v2"};
    // Current context required. Invalidates any graph capture in that context, whatever the thread's capture mode.
    Call<decltype(cuCtxSynchronize)> ctx_synchronize{library_, "cuCtxSynchronize"};
    // Current context required. Freeing waits for all running work of the context and, in a thread of relaxed capture
    // mode, leaves captures alone (measured: `wait_for_running_work`).
    Call<decltype(cuMemAlloc)> mem_alloc{library_, "cuMemAlloc", "cuMemAlloc_v2"};
    Call<decltype(cuMemFree)> mem_free{library_, "cuMemFree", "cuMemFree_v2"};
    Call<decltype(cuMemGetInfo)> mem_get_info{library_, "cuMemGetInfo", "cuMemGetInfo_v2"};

    // Virtual memory management. Sizes and addresses are multiples of the granularity. A handle is live from create to
    // release; its memory is freed once it is released and mapped nowhere. Unmap takes whole mappings, does not wait
    // for kernels that use them, and must come before the range is freed. Unmapping drops the access rights.
    Call<decltype(cuMemGetAllocationGranularity)> mem_get_allocation_granularity{library_,
                                                                                 "cuMemGetAllocationGranularity"};
    Call<decltype(cuMemAddressReserve)> mem_address_reserve{library_, "cuMemAddressReserve"};
    Call<decltype(cuMemAddressFree)> mem_address_free{library_, "cuMemAddressFree"};
    Call<decltype(cuMemCreate)> mem_create{library_, "cuMemCreate"};
    Call<decltype(cuMemRelease)> mem_release{library_, "cuMemRelease"};
    Call<decltype(cuMemMap)> mem_map{library_, "cuMemMap"};
    Call<decltype(cuMemUnmap)> mem_unmap{library_, "cuMemUnmap"};
    Call<decltype(cuMemSetAccess)> mem_set_access{library_, "cuMemSetAccess"};
    Call<decltype(cuMemGetAccess)> mem_get_access{library_, "cuMemGetAccess"};
    // Physical memory as a file descriptor, for another process to import. Each import is a handle of its own; the
    // memory is freed when all its handles, mappings and descriptors are gone, in every process.
    Call<decltype(cuMemExportToShareableHandle)> mem_export_to_shareable_handle{library_,
                                                                                "cuMemExportToShareableHandle"};
    Call<decltype(cuMemImportFromShareableHandle)> mem_import_from_shareable_handle{library_,
                                                                                    "cuMemImportFromShareableHandle"};
    Call<decltype(cuMemGetAllocationPropertiesFromHandle)> mem_get_allocation_properties_from_handle{
        library_, "cuMemGetAllocationPropertiesFromHandle"};

    // Host memory. Register: current context required; the memory must be mapped and not registered yet. Unregister
    // takes the base of a whole registered range, in which no copy may be in flight.
    Call<decltype(cuMemHostRegister)> mem_host_register{library_, "cuMemHostRegister", "cuMemHostRegister_v2"};
    Call<decltype(cuMemHostUnregister)> mem_host_unregister{library_, "cuMemHostUnregister"};

    // Streams and copies. The stream's context must be current. Copies of registered host memory return at once; both
    // sides must stay mapped and registered until the stream has been synchronised.
    Call<decltype(cuStreamCreate)> stream_create{library_, "cuStreamCreate"};
    Call<decltype(cuStreamDestroy)> stream_destroy{library_, "cuStreamDestroy", "cuStreamDestroy_v2"};
    Call<decltype(cuStreamSynchronize)> stream_synchronize{library_, "cuStreamSynchronize"};
    // The event's and the recorded stream's context must be current; a stream of any other may wait for it. Destroying
    // it is fine while it is waited for.
    Call<decltype(cuEventCreate)> event_create{library_, "cuEventCreate"};
    Call<decltype(cuEventRecord)> event_record{library_, "cuEventRecord"};
    Call<decltype(cuEventDestroy)> event_destroy{library_, "cuEventDestroy", "cuEventDestroy_v2"};
    Call<decltype(cuStreamWaitEvent)> stream_wait_event{library_, "cuStreamWaitEvent"};
    Call<decltype(cuMemcpyDtoDAsync)> memcpy_dtod_async{library_, "cuMemcpyDtoDAsync", "cuMemcpyDtoDAsync_v2"};
    Call<decltype(cuMemcpyHtoDAsync)> memcpy_htod_async{library_, "cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2"};
    Call<decltype(cuMemcpyDtoHAsync)> memcpy_dtoh_async{library_, "cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2"};
    Call<decltype(cuMemsetD8Async)> memset_d8_async{library_, "cuMemsetD8Async"};
    Call<decltype(cuMemsetD32Async)> memset_d32_async{library_, "cuMemsetD32Async"};

    // Kernels. The context must be current in which the module was loaded; it is never unloaded. A launch returns at
    // once, and the kernel reaches registered host memory by its host address where the device says so.
    Call<decltype(cuModuleLoadData)> module_load_data{library_, "cuModuleLoadData"};
    Call<decltype(cuModuleGetFunction)> module_get_function{library_, "cuModuleGetFunction"};
    Call<decltype(cuLaunchKernel)> launch_kernel{library_, "cuLaunchKernel"};

    // Swaps the calling thread's capture mode. In CU_STREAM_CAPTURE_MODE_RELAXED a thread may make calls that another
    // thread's capture would otherwise forbid, and that would invalidate it.
    Call<decltype(cuThreadExchangeStreamCaptureMode)> exchange_capture_mode{library_,
                                                                            "cuThreadExchangeStreamCaptureMode"};

    // Process checkpoints (checkpoint.h), since driver 570: older ones lack them. No context required.
    Call<decltype(cuCheckpointProcessGetState)> checkpoint_get_state{library_, "cuCheckpointProcessGetState",
                                                                     OldDriversLackIt{}};
    Call<decltype(cuCheckpointProcessLock)> checkpoint_lock{library_, "cuCheckpointProcessLock", OldDriversLackIt{}};
    Call<decltype(cuCheckpointProcessCheckpoint)> checkpoint_checkpoint{library_, "cuCheckpointProcessCheckpoint",
                                                                        OldDriversLackIt{}};
    Call<decltype(cuCheckpointProcessRestore)> checkpoint_restore{library_, "cuCheckpointProcessRestore",
                                                                  OldDriversLackIt{}};
    Call<decltype(cuCheckpointProcessUnlock)> checkpoint_unlock{library_, "cuCheckpointProcessUnlock",
                                                                OldDriversLackIt{}};

  private:
    explicit Driver(const std::string& path);
    int supported_version() const;
    void check(const char* call, CUresult result) const;

    const bool simulated_ = library_.find("cumemSimStats") != nullptr;
};

template <typename... Args>
void Call<CUresult(Args...)>::operator()(Args... args) const {
    const DriverCalls calls;
    if (!calls.allowed()) Driver::fail_suspended(name);
    if (CUresult result = function_(args...); result != CUDA_SUCCESS) Driver::get().fail(name, result);
}

// The path that this process's driver was opened from, or nothing if the process has no usable driver.
std::optional<std::string> driver_path();
// As "12.8" of 12080.
std::string version_text(int version);
bool driver_is_simulated();

// For destructors and rollback: runs `step` once more if it throws or returns false, because one refused call (another
// thread's capture, a transient fault) must not leak memory. Returns whether it succeeded.
template <typename Step>
bool try_twice(Step&& step) noexcept {
    for (int attempt = 0; attempt < 2; ++attempt) {
        try {
            if (step()) return true;
        } catch (const std::exception&) {
            // Tried again; the caller reports it if that fails too.
        }
    }
    return false;
}

// Makes the device's primary context current on this thread, and restores the previous one.
class ContextScope {
  public:
    explicit ContextScope(int device);
    ~ContextScope();
    ContextScope(const ContextScope&) = delete;
    ContextScope& operator=(const ContextScope&) = delete;

  private:
    bool pushed_ = false;
};

// Restores, at its end, the context that was current on this thread: for code that calls into libraries which change
// the current context and leave it changed (the CUDA runtime does).
class SavedContext {
  public:
    SavedContext();
    ~SavedContext();
    SavedContext(const SavedContext&) = delete;
    SavedContext& operator=(const SavedContext&) = delete;

  private:
    CUcontext context_ = nullptr;
};

// Lets this thread make calls that a graph capture on another thread would forbid.
class RelaxedCaptureScope {
  public:
    RelaxedCaptureScope();
    ~RelaxedCaptureScope();
    RelaxedCaptureScope(const RelaxedCaptureScope&) = delete;
    RelaxedCaptureScope& operator=(const RelaxedCaptureScope&) = delete;

  private:
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

int device_count();
// Throws InvalidState unless 0 <= device < device_count().
void check_device(int device);

struct MemoryInfo {
    size_t free_bytes, total_bytes;
};
MemoryInfo memory_info(int device);

// Waits for all work on the device, as CUDA documents it. Fails if a graph is being captured there, and breaks that
// capture.
void synchronize(int device);

}  // namespace cumem_sleep
