// The malloc and free hooks that PyTorch's caching allocator calls, and the table of segments.
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
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pools.h"
#include "vmm.h"

namespace cumem_sleep {

// One allocation that was handed out. Everything but `mapping`, the flags and `holds` stays as it was made.
struct Segment {
    // What the layer promises about the bytes. Physical state is the mapping's; a segment that is kAwake is kMapped.
    enum class Sleep {
        kAwake,     // in use
        kBackedUp,  // asleep; the backup store holds its bytes
        kDropped,   // asleep; its bytes are gone
    };

    Segment(uint64_t segment_id, int device, size_t bytes, const Pool& pool);

    // Maps physical memory under its address again (Mapping::map), on any thread. The segment must be held.
    void map();
    // Whether it has memory that serves when it wakes. Not where another process may still write to it, because a copy
    // was given up on: that would overwrite what its owner has back. What `keeps_bytes` was never filled by others.
    bool keeps_memory() const;

    // Which states may be combined: see the table in docs/how-it-works.md. The first is true after every step of an
    // operation, the second whenever no operation holds the segment. `is_unreleased`: the table of segments still has
    // to release this sleeping segment's memory; only the table knows that.
    bool is_valid() const;
    bool is_valid_at_rest(bool is_unreleased) const;
    std::string describe() const;

    const uint64_t id;  // never used twice in a process, unlike addresses
    const std::string tag;
    const BackupPlan backup;
    Mapping mapping;
    std::atomic<Sleep> sleep{Sleep::kAwake};
    std::atomic<bool> freed{false};       // written with the table's mutex held
    std::atomic<bool> has_backup{false};  // its backup may take host memory; never unset
    // kDropped, but its memory still has its bytes: a sleep was undone and the driver refused to map it again.
    std::atomic<bool> keeps_bytes{false};
    int holds = 0;  // guarded by the table's mutex
};

using SegmentPtr = std::shared_ptr<Segment>;

// All segments of the process. The table is never destroyed: PyTorch may free memory while the process exits.
class SegmentTable {
  public:
    static SegmentTable& get();

    // Maps new memory of at least `bytes` (rounded up to the granularity). Throws DriverError, OutOfDeviceMemory or
    // InvalidState, having undone every step. Memory of a region is refused as if the device were full where less than
    // the margin would stay free.
    SegmentPtr allocate(size_t bytes, int device, const Pool& pool);
    void set_region_margin(size_t bytes) { region_margin_ = bytes; }

    // Frees the segment at `address`, asleep or awake, after waiting for the work that runs on its device. May be
    // called during a graph capture. If an operation holds the segment, its memory is freed when the operation ends.
    // Throws InvalidState for an address that is not handed out (never was, or freed before); DriverError if the driver
    // refuses (the segment is then still there and can be freed again).
    void free(CUdeviceptr address);
    // The same for callers that will not retry: `reclaim` retries what the driver refuses. Throws InvalidState only.
    // Returns whether something remains to be released: the backup's host memory, or what the driver refused.
    bool free_for_good(CUdeviceptr address);

    // The segment is about to get a backup in host memory: once it is freed, `take_freed` reports it.
    void note_backup(Segment& segment);
    // The ids of segments with a backup that were freed since the last call.
    std::vector<uint64_t> take_freed();
    bool has_freed() const;

    // The segment that `address` lies in; null if none that is handed out.
    SegmentPtr find(CUdeviceptr address) const;
    // All segments handed out, oldest first. Throws InvalidState in a forked child, which has none.
    std::vector<SegmentPtr> segments() const;
    // Those that `wanted` accepts; it must not call the table.
    std::vector<SegmentPtr> segments(const std::function<bool(const Segment&)>& wanted) const;

    // A held segment keeps its address and memory: freeing it is deferred until the last release. Returns the segments
    // that are now held: all but those freed in the meantime. Waits for a `reclaim` on another thread.
    std::vector<SegmentPtr> hold(const std::vector<SegmentPtr>& segments);
    void release(const std::vector<SegmentPtr>& segments) noexcept;

    // Releases the physical memory of all `backed_up` and `dropped` segments, or of none. Segments must be held and
    // awake (or `keeps_bytes`, to be dropped now), and no work in flight may use them. Returns the bytes that are free
    // now: released, and not on loan to another process.
    //
    // First every mapping is detached, which can be undone with the bytes intact; then `last_check` may still throw;
    // then the memory is released. Throws what the driver or `last_check` threw, with everything mapped as before.
    // What the driver may refuse, and what that leaves:
    //   to detach a mapping      all segments stay awake
    //   to map it again, too     that segment sleeps. If it is backed up, its memory is not needed any more, and
    //                            `reclaim` releases it; if it is dropped, it keeps its bytes for the next wake
    //   to release its memory    that stays with the segment, which sleeps, and `reclaim` tries again
    size_t put_to_sleep(const std::vector<SegmentPtr>& backed_up, const std::vector<SegmentPtr>& dropped,
                        const std::function<void()>& last_check);

    // The beginning of a wake: the segments, which must be held and asleep, let go of memory that they do not keep
    // (`Segment::keeps_memory`), after all running work. Throws DriverError if the driver refuses.
    void begin_wake(const std::vector<SegmentPtr>& segments);
    // The end of a wake: the segments, which are mapped (Mapping::map) and filled, are in use again. Throws
    // InvalidState, and wakes none, if one is not mapped.
    void finish_wake(const std::vector<SegmentPtr>& segments);
    // Undoes a wake: releases the memory that it took, so that the segments sleep as before; those that are
    // `keeps_bytes` keep them. Segments that `finish_wake` has woken are left alone.
    void undo_wake(const std::vector<SegmentPtr>& segments) noexcept;

    // The segments, which must be held, sleep without their backups from now on: those that are kBackedUp are kDropped.
    void forget_backups(const std::vector<SegmentPtr>& segments) noexcept;

    // Retries what the driver refused earlier, but leaves alone what an operation holds. Never throws; returns how many
    // segments and other mappings still take memory that nobody uses.
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
    void keep_awake(const SegmentPtr& segment, Segment::Sleep otherwise);

    // Locked, before `mutex_`, while sleeping segments are taken down: an operation that could hold them in the middle
    // of that would map what is being released.
    std::mutex reclaiming_;
    mutable std::mutex mutex_;
    std::map<CUdeviceptr, SegmentPtr> by_address_;  // counted by device in segment_counts.h, with `mutex_` held
    std::vector<SegmentPtr> deferred_;              // no longer handed out, but the driver refused to free them
    std::set<SegmentPtr> unreleased_;               // asleep, but the driver refused to release their memory
    std::vector<uint64_t> freed_;                   // with a backup, for take_freed
    uint64_t next_id_ = 1;
    std::atomic<size_t> region_margin_{0};
};

// Called, without the interpreter lock, after a hook freed a segment whose backup or memory is still to be released.
// Not called after every free, because the work in Python costs as much as a driver call or two.
void set_free_listener(void (*listener)());

}  // namespace cumem_sleep

// Internal: for torch.cuda.memory.CUDAPluggableAllocator and the preload hook of this package, which set the tag and
// open the driver. They may change with every release. Null on failure: PyTorch then retries and raises its own
// out-of-memory error.
extern "C" {
__attribute__((visibility("default"))) void* cumem_sleep_malloc(size_t bytes, int device, CUstream stream);
__attribute__((visibility("default"))) void cumem_sleep_free(void* address, size_t bytes, int device, CUstream stream);
// What the preload hook asks (csrc/preload): whether the calling thread's allocations belong to a region; whether
// an address was handed out by `cumem_sleep_malloc`.
__attribute__((visibility("default"))) bool cumem_sleep_wants();
__attribute__((visibility("default"))) bool cumem_sleep_owns(void* address);
}
