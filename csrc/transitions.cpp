// The steps of a sleep and of a wake that change all of their segments at once, and how these steps are undone.
// Mapping itself is in vmm.cpp; operations/wake.py begins it.

#include <mutex>
#include <utility>

#include "allocator.h"
#include "driver.h"
#include "invariants.h"
#include "lent_memory.h"
#include "waiting.h"

namespace cumem_sleep {

size_t SegmentTable::put_to_sleep(const std::vector<SegmentPtr>& backed_up, const std::vector<SegmentPtr>& dropped,
                                  const std::function<void()>& last_check) {
    std::vector<SegmentPtr> all = backed_up;
    all.insert(all.end(), dropped.begin(), dropped.end());
    const auto sleep_of = [&](size_t i) {
        return i < backed_up.size() ? Segment::Sleep::kBackedUp : Segment::Sleep::kDropped;
    };
    size_t detached = 0;
    try {
        for (; detached < all.size(); ++detached) all[detached]->mapping.detach();
        last_check();
    } catch (...) {
        while (detached > 0) {
            --detached;
            keep_awake(all[detached], sleep_of(detached));
        }
        throw;
    }
    for (size_t i = 0; i < all.size(); ++i) {
        all[i]->sleep = sleep_of(i);
        all[i]->keeps_bytes = false;
        check_valid(*all[i]);
    }
    return release_all(all);
}

// Maps a detached segment again. If the driver refuses that, twice, the segment does sleep: `otherwise` says how.
void SegmentTable::keep_awake(const SegmentPtr& segment, Segment::Sleep otherwise) {
    const bool is_mapped = try_twice([&] {
        segment->mapping.map();
        return true;
    });
    segment->sleep = is_mapped ? Segment::Sleep::kAwake : otherwise;
    // A backup has the bytes of one that is backed up, so its memory may go. A dropped one has them there and nowhere
    // else.
    segment->keeps_bytes = segment->sleep == Segment::Sleep::kDropped;
    check_valid(*segment);
    if (segment->sleep != Segment::Sleep::kBackedUp) return;
    std::lock_guard<std::mutex> lock(mutex_);
    unreleased_.insert(segment);
}

size_t SegmentTable::release_all(const std::vector<SegmentPtr>& segments) noexcept {
    size_t bytes = 0;
    for (const SegmentPtr& segment : segments) {
        if (segment->sleep == Segment::Sleep::kAwake || !segment->mapping.has_memory()) continue;
        if (segment->keeps_bytes && !segment->mapping.is_mapped()) continue;
        const bool becomes_free = !is_on_loan(segment->mapping.memory());
        // Tried twice and then left for later, never undone: memory released earlier has lost its bytes.
        const bool released = segment->mapping.state() == Mapping::State::kDetached && try_twice([&] {
                                  segment->mapping.release();
                                  return true;
                              });
        check_valid(*segment);
        if (released) {
            bytes += becomes_free ? segment->mapping.bytes() : 0;
        } else {
            std::lock_guard<std::mutex> lock(mutex_);
            unreleased_.insert(segment);
        }
    }
    return bytes;
}

// Detaches segments that are mapped although they sleep, once no running work could use them. What the driver refuses
// to unmap stays mapped but is reported as asleep: the next wake fills it again.
void SegmentTable::detach_unused(const std::vector<SegmentPtr>& segments) noexcept {
    int device = -1;  // that was looked at last: to remember more would allocate, which may fail
    bool is_quiet = false;
    for (const SegmentPtr& segment : segments) {
        if (segment->sleep == Segment::Sleep::kAwake || !segment->mapping.is_mapped()) continue;
        if (std::exchange(device, segment->mapping.device()) != segment->mapping.device())
            is_quiet = try_twice([&] {
                wait_for_running_work(device);
                return true;
            });
        if (!is_quiet) continue;
        try_twice([&] {
            segment->mapping.detach();
            return true;
        });
        check_valid(*segment);
    }
}

void SegmentTable::begin_wake(const std::vector<SegmentPtr>& segments) {
    for (const SegmentPtr& segment : segments) {
        if (!segment->mapping.has_memory() || segment->keeps_memory()) continue;
        ContextScope context(segment->mapping.device());
        if (segment->mapping.is_mapped()) wait_for_running_work(segment->mapping.device());
        segment->mapping.detach();
        segment->mapping.release();
        check_valid(*segment);
    }
}

void SegmentTable::finish_wake(const std::vector<SegmentPtr>& segments) {
    for (const SegmentPtr& segment : segments)
        if (segment->mapping.state() != Mapping::State::kMapped)
            throw InvalidState("a segment that was to wake is not mapped");
    for (const SegmentPtr& segment : segments) {
        segment->sleep = Segment::Sleep::kAwake;
        segment->keeps_bytes = false;
        check_valid(*segment);
    }
}

void SegmentTable::undo_wake(const std::vector<SegmentPtr>& segments) noexcept {
    detach_unused(segments);
    release_all(segments);
    int device = -1;
    for (const SegmentPtr& segment : segments)
        if (segment->sleep != Segment::Sleep::kAwake &&
            std::exchange(device, segment->mapping.device()) != segment->mapping.device())
            release_waiter(device);  // a retry of the wake may need every byte
}

void SegmentTable::forget_backups(const std::vector<SegmentPtr>& segments) noexcept {
    for (const SegmentPtr& segment : segments) {
        if (segment->sleep != Segment::Sleep::kBackedUp) continue;
        segment->sleep = Segment::Sleep::kDropped;
        check_valid(*segment);
    }
}

}  // namespace cumem_sleep
