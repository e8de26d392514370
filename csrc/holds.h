// What the caller of the layer holds for a scope: segments, an address on its way to it, a label, the thread's CUDA
// state. Objects rather than pairs of calls, so that an interrupt between the two loses nothing.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "allocator.h"
#include "driver.h"

namespace cumem_sleep {

// Holds segments for one operation.
class Pinned {
  public:
    explicit Pinned(const std::vector<SegmentPtr>& segments) : segments_(SegmentTable::get().pin(segments)) {}
    ~Pinned() { release(); }
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;

    // Those that were not freed before.
    const std::vector<SegmentPtr>& segments() const { return segments_; }
    void release() noexcept;

  private:
    std::vector<SegmentPtr> segments_;
};

// Memory on its way to a caller: freed with this object unless it was handed out. Destroyed with the interpreter lock.
class Allocation {
  public:
    Allocation(size_t bytes, const Label& label, int device)
        : address_(SegmentTable::get().allocate(bytes, device, label)->mapping.address()) {}
    ~Allocation();
    Allocation(const Allocation&) = delete;
    Allocation& operator=(const Allocation&) = delete;

    CUdeviceptr hand_out() { return std::exchange(address_, 0); }

  private:
    CUdeviceptr address_;
};

// The label of the thread for a scope; only that thread gets its old label back.
class ThreadLabel {
  public:
    explicit ThreadLabel(const Label& label)
        : thread_(std::this_thread::get_id()), outer_(exchange_thread_label(kept_label(label))) {}
    ~ThreadLabel() { restore(); }
    ThreadLabel(const ThreadLabel&) = delete;
    ThreadLabel& operator=(const ThreadLabel&) = delete;

    void restore();

  private:
    const std::thread::id thread_;
    const Label* const outer_;
    bool active_ = true;
};

// One of the driver's scopes (SavedContext, RelaxedCaptureScope), entered after it was made: Python's `with` makes an
// object first and enters it then.
template <typename Scope>
class Entered {
  public:
    void enter() { scope_ = std::make_unique<Scope>(); }
    void leave() { scope_.reset(); }

  private:
    std::unique_ptr<Scope> scope_;
};

}  // namespace cumem_sleep
