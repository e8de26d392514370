// What Python holds for a scope: segments, an address not yet handed out, the thread's CUDA state. These are
// objects rather than pairs of calls, so that an interrupt between the two calls loses nothing.
#pragma once

#include <memory>
#include <string>
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

    // Those that had not been freed.
    const std::vector<SegmentPtr>& segments() const { return segments_; }
    void release() noexcept;

  private:
    std::vector<SegmentPtr> segments_;
};

// Memory that is not yet handed out: freed with this object unless `hand_out` was called. Destroyed with the
// interpreter lock held.
class Allocation {
  public:
    Allocation(size_t bytes, const std::string& tag, int device, BackupPlan backup)
        : address_(SegmentTable::get().allocate(bytes, device, {tag, backup})->mapping.address()) {}
    ~Allocation();
    Allocation(const Allocation&) = delete;
    Allocation& operator=(const Allocation&) = delete;

    CUdeviceptr hand_out() { return std::exchange(address_, 0); }

  private:
    CUdeviceptr address_;
};

// One of the driver's scopes (SavedContext, RelaxedCaptureScope), entered separately because Python's `with` first
// makes an object and then enters it.
template <typename Scope>
class Entered {
  public:
    void enter() { scope_ = std::make_unique<Scope>(); }
    void leave() { scope_.reset(); }

  private:
    std::unique_ptr<Scope> scope_;
};

}  // namespace cumem_sleep
