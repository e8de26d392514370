#include "driver.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>

#include "per_device.h"

namespace cumem_sleep {

namespace {

// Virtual memory management came with CUDA 10.2, but PyTorch 2.8 and newer need CUDA 12.
constexpr int kOldestDriver = 12000;

std::atomic<const Driver*> open_driver{nullptr};
std::atomic<bool> forked{false};  // a hook reads it eight times; getpid, a system call, would cost a microsecond

std::atomic<bool> suspended{false};
std::atomic<int> calls_under_way{0};  // or blocks of them
thread_local int calls_of_this_thread = 0;
std::atomic<int> leases{0};
// Scopes of Python's that this thread has entered, and nobody has left. A plain pointer, null if there are none: a
// thread may still call the driver after its thread_local objects are destroyed.
thread_local std::shared_ptr<std::atomic<int>>* scopes_here = nullptr;

std::string sentence(const std::string& call, const std::string& error, const std::string& detail,
                     const std::string& segment) {
    std::string text = call + " failed with " + error;
    if (!segment.empty()) text += ": for " + segment;
    if (!detail.empty()) text += ": " + detail;
    return text;
}

// Retained once per device and kept: the context must outlive our memory in it.
CUcontext primary_context(int device) {
    static auto* const contexts = new PerDevice<CUcontext>;  // never destroyed: memory may be freed at exit
    return contexts->with(device, [device](CUcontext& context) {
        if (context) return context;
        check_device(device);
        Driver::get().primary_ctx_retain(&context, device);
        return context;
    });
}

}  // namespace

bool suspend_driver_calls(std::chrono::nanoseconds at_most) {
    const auto end = std::chrono::steady_clock::now() + at_most;
    suspended = true;
    while (calls_under_way > 0) {
        if (std::chrono::steady_clock::now() >= end) {
            suspended = false;
            return false;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
}

void resume_driver_calls() { suspended = false; }

bool driver_calls_suspended() noexcept { return suspended; }

// Counted first: either suspend_driver_calls sees this thread, or this thread sees that calls are suspended.
DriverCalls::DriverCalls() noexcept {
    if (calls_of_this_thread == 0) ++calls_under_way;
    allowed_ = calls_of_this_thread > 0 || !suspended || (scopes_here && **scopes_here > 0);
    if (allowed_)
        ++calls_of_this_thread;
    else
        --calls_under_way;
}

DriverCalls::~DriverCalls() {
    if (allowed_ && --calls_of_this_thread == 0) --calls_under_way;
}

bool ScopeOfDriverCalls::enter() {
    leave();
    ++calls_under_way;
    if (const DriverCalls now; !now.allowed()) {
        --calls_under_way;
        return false;
    }
    if (!scopes_here) scopes_here = new std::shared_ptr<std::atomic<int>>(std::make_shared<std::atomic<int>>(0));
    entered_ = *scopes_here;
    ++*entered_;
    if (is_lease_) ++leases;
    return true;
}

void ScopeOfDriverCalls::leave() {
    if (!entered_) return;
    --*entered_;
    entered_.reset();
    if (is_lease_) --leases;
    --calls_under_way;
    if (!scopes_here || **scopes_here > 0) return;
    delete scopes_here;
    scopes_here = nullptr;
}

bool driver_is_leased() noexcept { return leases > 0; }

DriverError::DriverError(std::string call_name, std::string error_name, std::string detail_text,
                         std::string segment_text)
    : std::runtime_error(sentence(call_name, error_name, detail_text, segment_text)),
      call(std::move(call_name)),
      error(std::move(error_name)),
      detail(std::move(detail_text)),
      segment(std::move(segment_text)) {}

OutOfDeviceMemory::OutOfDeviceMemory(int device_ordinal, size_t needed, size_t free, std::string segment_text)
    : DriverError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", "", std::move(segment_text)),
      device(device_ordinal),
      needed_bytes(needed),
      free_bytes(free) {}

void Driver::open(const std::string& path) {
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    if (const Driver* driver = open_driver) {
        if (driver->path() != path)
            throw InvalidState("this process already runs on " + driver->path() + "; it cannot change to " + path);
        get();  // throws in a forked child
        return;
    }
    open_driver = new Driver(path);
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

const Driver& Driver::get() {
    const Driver* driver = open_driver;
    if (!driver) throw InvalidState("no CUDA driver was opened yet");
    if (is_forked())
        throw InvalidState(
            "this process was forked after its parent first used the GPU: CUDA does not survive a fork; fork before "
            "the "
            "first use, or start the process with the spawn method");
    return *driver;
}

bool Driver::is_open() noexcept { return open_driver != nullptr; }

bool Driver::is_forked() noexcept { return forked; }

Library::Library(const std::string& its_path) : path(its_path), handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (!handle_) throw DriverError("dlopen", "CUDA_ERROR_NO_DRIVER", dlerror());
}

void* Library::find(const char* symbol) const noexcept { return dlsym(handle_, symbol); }

void* Library::need(const char* symbol) const {
    if (void* const found = find(symbol)) return found;
    throw DriverError("dlsym", "CUDA_ERROR_NOT_FOUND",
                      path + " has no " + symbol + ": update the NVIDIA driver (CUDA 12.0 is needed)");
}

Driver::Driver(const std::string& path) : library_(path) { check("cuInit", init.attempt(0)); }

int Driver::supported_version() const {
    int version = 0;
    check("cuDriverGetVersion", driver_get_version.attempt(&version));
    if (version < kOldestDriver)
        throw DriverError("cuDriverGetVersion", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
                          "the driver supports CUDA " + version_text(version) +
                              "; 12.0 is needed for virtual memory management: update the NVIDIA driver");
    return version;
}

void Driver::check(const char* call, CUresult result) const {
    if (result != CUDA_SUCCESS) fail(call, result);
}

std::string Driver::error_name(CUresult result) const {
    const char* text = nullptr;
    if (get_error_name.attempt(result, &text) != CUDA_SUCCESS || !text)
        return "CUresult " + std::to_string(static_cast<int>(result));
    return text;
}

void Driver::fail(const char* call, CUresult result, const std::string& segment) const {
    const char* text = nullptr;
    get_error_string.attempt(result, &text);
    throw DriverError(call, error_name(result), text ? text : "", segment);
}

void Driver::fail_suspended(const char* call) {
    throw InvalidState(std::string(call) +
                       " while the CUDA state of this process is checkpointed (level 3): wake it up first");
}

std::string version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::optional<std::string> driver_path() {
    if (!Driver::is_open() || Driver::is_forked()) return std::nullopt;
    return Driver::get().path();
}

bool driver_is_simulated() { return driver_path() && Driver::get().simulated(); }

ContextScope::ContextScope(int device) {
    const CUcontext context = primary_context(device);
    const Driver& driver = Driver::get();
    CUcontext current = nullptr;
    driver.ctx_get_current(&current);
    if (current == context) return;
    driver.ctx_push_current(context);
    pushed_ = true;
}

ContextScope::~ContextScope() {
    if (!pushed_) return;
    try_twice([] {
        CUcontext popped = nullptr;
        return Driver::get().ctx_pop_current.attempt(&popped) == CUDA_SUCCESS;
    });
}

SavedContext::SavedContext() { Driver::get().ctx_get_current(&context_); }

SavedContext::~SavedContext() {
    try_twice([this] {
        CUcontext current = nullptr;
        const Driver& driver = Driver::get();
        driver.ctx_get_current(&current);
        return current == context_ || driver.ctx_set_current.attempt(context_) == CUDA_SUCCESS;
    });
}

RelaxedCaptureScope::RelaxedCaptureScope() { Driver::get().exchange_capture_mode(&mode_); }

RelaxedCaptureScope::~RelaxedCaptureScope() {
    try_twice([this] { return Driver::get().exchange_capture_mode.attempt(&mode_) == CUDA_SUCCESS; });
}

int device_count() {
    int count = 0;
    Driver::get().device_get_count(&count);
    return count;
}

void check_device(int device) {
    const int count = device_count();
    if (device < 0 || device >= count)
        throw InvalidState("device " + std::to_string(device) + " does not exist: there are " + std::to_string(count));
}

MemoryInfo memory_info(int device) {
    ContextScope scope(device);
    MemoryInfo info{};
    Driver::get().mem_get_info(&info.free_bytes, &info.total_bytes);
    return info;
}

void synchronize(int device) {
    ContextScope scope(device);
    Driver::get().ctx_synchronize();
}

}  // namespace cumem_sleep
