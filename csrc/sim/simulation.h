// The simulated driver: its state.
//
// This library implements the part of libcuda that cumem-sleep and vLLM's allocator use, on ordinary memory: physical
// memory is a memfd, a device address is an ordinary address, a stream is a thread. Every exported call runs its body
// through driver_call() under one mutex, the state's; work on streams runs without it. The state is never destroyed,
// since stream threads may outlive main().
//
// What each file holds: driver_call.h (the one way in), devices.cpp (devices, contexts), vmm.cpp (reserve, create, map,
// access), registration.cpp (host memory), streams.cpp (streams, events, host functions), copies.cpp, captures.cpp,
// initialization.cpp (cuInit, errors, symbol lookup), process_board.cpp and checkpoint.cpp (other processes),
// call_table.cpp and control.cpp (injected failures, statistics).
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "call_table.h"
#include "cuda_api.h"

namespace cumem_sim {

using Lock = std::unique_lock<std::mutex>;

constexpr std::size_t kGranularityBytes = std::size_t{2} << 20;

// How a call body fails. Deliberately not a std::exception: it never leaves driver_call().
struct Refused {
    CUresult result;
};

inline void require(bool condition, CUresult otherwise) {
    if (!condition) throw Refused{otherwise};
}

// An enumerator that a caller passed, as a number: C programs may pass any number, and in C++ merely reading one that
// the enumeration does not have is undefined.
template <typename Enum>
int number_of(const Enum& value) {
    static_assert(sizeof value == sizeof(int));
    int number = 0;
    std::memcpy(&number, &value, sizeof number);
    return number;
}

// Whether a piece of stream work has run; what events and synchronisation wait for.
struct Completion {
    bool done = false;
};

class Physical;  // vmm.h
struct Stream;

struct Context {
    CUcontext handle = nullptr;
    int device = 0;
    unsigned retains = 0;
    bool is_being_made = false;
    std::uint64_t bytes = 0;        // of device memory
    CUresult fault = CUDA_SUCCESS;  // sticky: set by stream work that went wrong
    std::shared_ptr<Stream> legacy;
    std::vector<std::shared_ptr<Stream>> streams;  // the legacy stream and destroyed ones that still have work too
};

// Memory that this process has released but another one has imported and not yet released.
struct HeldElsewhere {
    int fd;
    std::size_t size;
};

struct Device {
    int ordinal = 0;               // in this process
    int number = 0;                // in the host: processes may order its devices differently
    std::uint64_t used_bytes = 0;  // ask used_bytes() of vmm.h, which changes it too
    std::vector<HeldElsewhere> held_elsewhere;
    Context primary;
};

// Memory of cuMemAlloc.
struct Allocation {
    Device* device;
    std::size_t size;
};

// What stream work touches. The call that takes it away clears `alive` and waits until `users` is 0.
struct Touchable {
    bool alive = true;
    int users = 0;
};

struct Mapping : Touchable {
    CUdeviceptr base = 0;
    std::size_t size = 0;
    std::shared_ptr<Physical> physical;
    std::map<int, CUmemAccess_flags> access;  // by device

    CUmemAccess_flags access_of(int device) const;
};

struct Registration : Touchable {
    std::uintptr_t base = 0;
    bool read_only = false;
    std::size_t size = 0;
    const Context* context = nullptr;
};

struct Capture {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    std::thread::id thread;
    CUstream origin = nullptr;
    std::vector<std::shared_ptr<Stream>> streams;  // the origin and those that joined through an event
    std::size_t nodes = 0;
    bool invalidated = false;
    bool ended = false;
};

struct Graph {
    std::size_t nodes = 0;
};

struct Work {
    std::function<CUresult(Lock&)> run;  // may unlock while it runs; empty: only waits
    std::vector<std::shared_ptr<Completion>> after;
    std::shared_ptr<Completion> completion = std::make_shared<Completion>();
};

struct Stream {
    Stream(CUstream stream_handle, Context& owner, bool is_blocking)
        : handle(stream_handle), context(owner), blocking(is_blocking) {}

    CUstream handle;
    Context& context;
    bool blocking;  // ordered with the legacy stream
    bool destroyed = false;
    bool has_worker = false;
    std::deque<Work> queue;
    std::shared_ptr<Completion> last;  // of the work enqueued last; null before any
    std::shared_ptr<Capture> capture;
};

struct Event {
    Context* context = nullptr;
    std::shared_ptr<Completion> recorded;  // null before the first record, and after a record in a capture
    std::shared_ptr<Capture> capture;      // of the last record, if the stream was capturing
};

struct Settings {
    std::uint64_t device_bytes = std::uint64_t{1} << 30;
    std::uint64_t context_bytes = 0;
    std::uint64_t context_us_per_mib = 0;  // of registered host memory, which a new context maps
    int devices = 1;
    std::vector<int> device_order;  // each ordinal's number in the host; devices not named follow at the end
    int driver_version = 13000;
    unsigned copy_delay_us = 200;
    bool claims_fabric = false;  // the attribute only: fabric handles are always refused
    bool host_pointers = true;   // whether kernels reach host memory
    bool integrated = false;     // device memory is the host's: what is registered takes of it, too
    std::string error;           // a bad environment variable, which makes cuInit fail

    static Settings from_environment();
};

constexpr int kMaxDevices = 64;

struct Simulation {
    Simulation(const Simulation&) = delete;
    Simulation& operator=(const Simulation&) = delete;
    static Simulation& instance();

    std::mutex mutex;
    std::condition_variable progress;  // work ended, work arrived, something is no longer touched

    Settings settings = Settings::from_environment();
    CallTable calls;
    bool initialized = false;
    bool forked = false;  // this process is a child forked after cuInit
    // Called in such a child, to leave what it shares with its parent; cuInit says how.
    void (*leave_parent)(const Simulation&) = nullptr;

    std::vector<std::unique_ptr<Device>> devices;  // never shrinks; settings.devices of them are visible
    std::map<CUmemGenericAllocationHandle, std::shared_ptr<Physical>> handles;
    std::map<CUdeviceptr, std::size_t> reservations;
    std::map<CUdeviceptr, std::shared_ptr<Mapping>> mappings;
    std::map<CUdeviceptr, Allocation> allocations;
    std::map<std::uintptr_t, std::shared_ptr<Registration>> registrations;
    std::map<CUstream, std::shared_ptr<Stream>> streams;  // without the legacy streams
    std::map<CUevent, std::shared_ptr<Event>> events;
    std::map<CUgraph, Graph> graphs;
    std::vector<std::shared_ptr<Capture>> captures;  // begun and not ended

    // Never reused, so that use after destruction is always found.
    std::uintptr_t new_handle() { return next_handle_ += 16; }

    Device& device(int ordinal);  // throws Refused

  private:
    Simulation();
    std::uintptr_t next_handle_ = 0x51D00000;
};

// The context stack of a thread, the current one last. No destructor: at exit a thread may make calls after its
// thread_local objects were destroyed.
class ContextStack {
  public:
    bool empty() const { return size_ == 0; }
    Context* back() const { return entries_.at(size_ - 1); }
    void push_back(Context* context) {
        require(size_ < entries_.size(), CUDA_ERROR_OUT_OF_MEMORY);
        entries_[size_++] = context;
    }
    void pop_back() { --size_; }

  private:
    std::array<Context*, 256> entries_{};
    std::size_t size_ = 0;
};

struct ThreadState {
    ContextStack contexts;
    CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    bool runs_stream_work = false;
};
ThreadState& this_thread();

// Releases the state's mutex for a scope.
class Unlocked {
  public:
    explicit Unlocked(Lock& lock) : lock_(lock) { lock_.unlock(); }
    ~Unlocked() { lock_.lock(); }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

  private:
    Lock& lock_;
};

}  // namespace cumem_sim
