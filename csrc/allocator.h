// The malloc and free hooks that PyTorch's caching allocator calls, the label of each thread, and the table of
// segments.
//
// Nothing here takes the Python interpreter lock: the hooks run on whichever thread PyTorch calls them from, with or
// without it, and holding a lock of ours while waiting for the interpreter would deadlock.
#pragma once

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "vmm.h"

namespace cumem_sleep {

// Who says what becomes of the bytes at a sleep. Memory of a pool (kByLevel) and of a region sleep apart from each
// other, by calls of their own.
enum class Backup {
    kByLevel,  // of a pool: the level, or the tags of the call
    kAlways,   // of a region whose bytes are kept
    kNever,    // of a region whose bytes are dropped
};

// What an allocation is given, and keeps.
struct Label {
    std::string tag = "default";
    Backup backup = Backup::kByLevel;

    bool operator<(const Label& other) const { return std::tie(tag, backup) < std::tie(other.tag, other.backup); }
};

// One allocation that was handed out. Everything but `mapping`, the flags and `pins` stays as it was made.
struct Segment {
    // What the layer promises about the bytes. Physical state is the mapping's; a segment that is kAwake is kMapped.
    enum class Sleep {
        kAwake,     // in use
        kBackedUp,  // asleep; the backup store holds its bytes
        kDropped,   // asleep; its bytes are gone
    };

    Segment(uint64_t segment_id, int device, size_t bytes, const Label& label);

    // Physical memory under its address again (Mapping::map), on any thread. It must be pinned.
    void map();

    // Which states go together: the table of docs/how-it-works.md. The first holds whenever an operation has finished a
    // step, the second also when no operation has the segment pinned; whether memory that is left to a sleeping one is
    // to be released later, only the table of segments knows.
    bool is_valid() const;
    bool is_valid_at_rest(bool is_unreleased) const;
    std::string describe() const;

    const uint64_t id;  // never used twice in a process, unlike addresses
    const std::string tag;
    const Backup backup;
    Mapping mapping;
    std::atomic<Sleep> sleep{Sleep::kAwake};
    std::atomic<bool> freed{false};       // written under the table's mutex
    std::atomic<bool> has_backup{false};  // host memory may be held for it; never unset
    // kDropped, but its memory has its bytes still: a sleep was undone and the driver refused to map it again.
    std::atomic<bool> keeps_bytes{false};
    // Awake, but the codec works in its memory. Unless its bytes were put back by then, the last unpin drops it: nobody
    // may take what the codec left for them.
    std::atomic<bool> lent{false};
    int pins = 0;  // guarded by the table's mutex
};

using SegmentPtr = std::shared_ptr<Segment>;

// All segments of the process. The table is never destroyed: PyTorch may free memory while the process exits.
class SegmentTable {
  public:
    static SegmentTable& get();

    // Maps new memory of at least `bytes` (rounded up to the granularity). Throws DriverError, OutOfDeviceMemory or
    // InvalidState, having undone every step. Memory of a region is refused as if the device were full where less than
    // the margin would stay free.
    SegmentPtr allocate(size_t bytes, int device, const Label& label);
    void set_region_margin(size_t bytes) { region_margin_ = bytes; }

    // Gives the segment at `address` back, asleep or awake, after waiting for the work that runs on its device; may be
    // called beside a graph capture. If an operation has the segment pinned, the memory goes when the operation ends.
    // Throws InvalidState for an address that is not handed out (never was, or freed before); DriverError if the driver
    // refuses (the segment is then still there and can be freed again).
    void free(CUdeviceptr address);
    // The same for callers that will not ask again: what the driver refuses is tried again by `reclaim`. Throws
    // InvalidState only. Returns whether more is to be given back: host memory of its backup, or what was refused.
    bool free_for_good(CUdeviceptr address);

    // Host memory is about to be held for the segment: when it is freed, `take_freed` says so.
    void note_backup(Segment& segment);
    // The ids of segments with a backup that were freed since this was asked last.
    std::vector<uint64_t> take_freed();
    bool has_freed() const;

    // The segment that `address` lies in; null if none that is handed out.
    SegmentPtr find(CUdeviceptr address) const;
    // Segments that are handed out, oldest first. Throws InvalidState in a forked child, which has none.
    std::vector<SegmentPtr> segments() const;

    // A pinned segment keeps its address and memory; freeing it is put off until the last unpin. Returns those that
    // were pinned: all but what was freed meanwhile. Waits for a `reclaim` on another thread. The last unpin of a
    // segment that is `lent` drops it.
    std::vector<SegmentPtr> pin(const std::vector<SegmentPtr>& segments);
    void unpin(const std::vector<SegmentPtr>& segments) noexcept;

    // Takes physical memory away from all `backed_up` and `dropped` segments, or from none: first every mapping is
    // detached, which can be undone with the bytes intact, then `last_check` may still throw, then memory is released.
    // Throws what the driver or `last_check` threw, with everything mapped as before; what the driver refuses to map
    // again sleeps from then on, and what was not backed up keeps its bytes for the next wake. Segments must be pinned,
    // awake (or such as keep their bytes, to be dropped now), and no work that uses them in flight. Returns the bytes
    // released; memory that the driver would not release stays with its segment and is tried again by `reclaim`.
    size_t put_to_sleep(const std::vector<SegmentPtr>& backed_up, const std::vector<SegmentPtr>& dropped,
                        const std::function<void()>& last_check);

    // The end of a wake: segments that were mapped (Mapping::map) and filled are in use again. Throws InvalidState, and
    // wakes none, if one is not mapped.
    void finish_wake(const std::vector<SegmentPtr>& segments);
    // The undoing of a wake: the memory that it had taken goes back, and the segments sleep as before, those that keep
    // their bytes with them; what `finish_wake` has woken is left alone.
    void undo_wake(const std::vector<SegmentPtr>& segments) noexcept;

    // Tries again what the driver refused earlier, but leaves alone what an operation has pinned. Never throws; returns
    // the number of segments, and of other mappings, that still hold memory which nobody uses.
    size_t reclaim() noexcept;

    // For `check_valid`; with `mutex_` held.
    bool is_valid() const;
    std::string describe() const;

  private:
    void hand_out(const SegmentPtr& segment);
    std::pair<SegmentPtr, bool> take_out(CUdeviceptr address);
    void destroy(Segment& segment);
    void destroy_or_defer(const SegmentPtr& segment) noexcept;
    size_t release_all(const std::vector<SegmentPtr>& segments) noexcept;
    void detach_unused(const std::vector<SegmentPtr>& segments) noexcept;
    void drop_lent(const std::vector<SegmentPtr>& segments) noexcept;

    // Held, before `mutex_`, for as long as sleeping segments are taken down: an operation that pinned them in the
    // middle of that would map what is being released.
    std::mutex reclaiming_;
    mutable std::mutex mutex_;
    std::map<CUdeviceptr, SegmentPtr> by_address_;
    std::map<int, size_t> handed_out_;    // segments of by_address_, by device
    std::vector<SegmentPtr> deferred_;    // no longer handed out, but the driver would not take them back
    std::vector<SegmentPtr> unreleased_;  // asleep, but the driver would not take their memory
    std::vector<uint64_t> freed_;         // with a backup, for take_freed
    uint64_t next_id_ = 1;
    std::atomic<size_t> region_margin_{0};
};

// A copy that is never destroyed: threads allocate until the process ends, and later than their own objects do.
const Label* kept_label(const Label& label);
// What the calling thread's allocations get: its own label, or that of the process as long as it has none (null).
const Label& thread_label();
// Returns the thread's own, which was. The label must be kept.
const Label* exchange_thread_label(const Label* label);
// What threads without a label of their own give; memory of a pool called "default" until set. The driver at
// `driver_path` is opened when the preload hook asks for the first time, so that this touches no GPU.
void set_process_label(const Label& label, const std::string& driver_path);

// Called, without the interpreter lock, after a hook freed a segment that leaves more to be given back: not after each,
// because what Python does then costs as much as a driver call or two.
void set_free_listener(void (*listener)());

}  // namespace cumem_sleep

// What torch.cuda.memory.CUDAPluggableAllocator is given. Null on failure: PyTorch then retries and raises its own
// out-of-memory error.
extern "C" {
__attribute__((visibility("default"))) void* cumem_sleep_malloc(size_t bytes, int device, CUstream stream);
__attribute__((visibility("default"))) void cumem_sleep_free(void* address, size_t bytes, int device, CUstream stream);
// What the preload hook asks (csrc/preload): whether the calling thread's allocations belong to a region; whether
// an address was handed out by `cumem_sleep_malloc`.
__attribute__((visibility("default"))) bool cumem_sleep_wants();
__attribute__((visibility("default"))) bool cumem_sleep_owns(void* address);
}
