// What the caller of the layer holds for a scope: segments, an address on its way to it, a tag, the thread's CUDA
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
class HeldSegments {
  public:
    explicit HeldSegments(const std::vector<SegmentPtr>& segments) : segments_(SegmentTable::get().hold(segments)) {}
    ~HeldSegments() { release(); }
    HeldSegments(const HeldSegments&) = delete;
    HeldSegments& operator=(const HeldSegments&) = delete;

    // Those that were not freed before.
    const std::vector<SegmentPtr>& segments() const { return segments_; }
    void release() noexcept;

  private:
    std::vector<SegmentPtr> segments_;
};

// Memory on its way to a caller: freed with this object unless it was handed out. Destroyed with the interpreter lock.
class Allocation {
  public:
    Allocation(size_t bytes, const std::string& tag, int device)
        : address_(SegmentTable::get().allocate(bytes, device, tag)->mapping.address()) {}
    ~Allocation();
    Allocation(const Allocation&) = delete;
    Allocation& operator=(const Allocation&) = delete;

    CUdeviceptr hand_out() { return std::exchange(address_, 0); }

  private:
    CUdeviceptr address_;
};

// The tag of the thread for a scope; only that thread gets its old tag back.
class ThreadTag {
  public:
    explicit ThreadTag(const std::string& tag)
        : thread_(std::this_thread::get_id()), outer_(exchange_thread_tag(tag)) {}
    ~ThreadTag() { restore(); }
    ThreadTag(const ThreadTag&) = delete;
    ThreadTag& operator=(const ThreadTag&) = delete;

    void restore();

  private:
    const std::thread::id thread_;
    const std::string outer_;
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
