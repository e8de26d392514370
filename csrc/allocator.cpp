#include "allocator.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <set>
#include <utility>

#include "copy_stream.h"
#include "driver.h"
#include "host_memory.h"
#include "invariants.h"
#include "lent_memory.h"
#include "segment_counts.h"
#include "waiting.h"

namespace cumem_sleep {

namespace {

std::atomic<void (*)()> free_listener{nullptr};

const char* name_of(Segment::Sleep sleep) {
    switch (sleep) {
        case Segment::Sleep::kAwake:
            return "awake";
        case Segment::Sleep::kBackedUp:
            return "backed up";
        case Segment::Sleep::kDropped:
            return "dropped";
    }
    return "?";
}

size_t round_up(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

}  // namespace

Segment::Segment(uint64_t segment_id, int device, size_t bytes, const Pool& pool)
    : id(segment_id), tag(pool.tag), backup(pool.backup), mapping(device, bytes) {}

bool Segment::keeps_memory() const {
    return mapping.has_memory() && (keeps_bytes || !is_filled_on_loan(mapping.memory()));
}

void Segment::map() {
    ContextScope context(mapping.device());
    mapping.map();
    check_valid(*this);
}

bool Segment::is_valid() const {
    if (freed) return true;  // it may be on its way out, one step after the other
    const bool has_address = mapping.state() != Mapping::State::kUnreserved;
    switch (sleep) {
        case Sleep::kAwake:  // detached in the middle of a sleep
            return mapping.has_memory() && !keeps_bytes;
        case Sleep::kBackedUp:
            return has_address && has_backup && !keeps_bytes;
        case Sleep::kDropped:
            return has_address && (mapping.has_memory() || !keeps_bytes);
    }
    return false;
}

bool Segment::is_valid_at_rest(bool is_unreleased) const {
    if (!is_valid()) return false;
    if (sleep == Sleep::kAwake) return mapping.state() == Mapping::State::kMapped;
    return !mapping.has_memory() || keeps_bytes || is_unreleased;
}

std::string Segment::describe() const {
    std::string text = "segment " + std::to_string(id) + " (" + tag + "): " + name_of(sleep) + ", its mapping " +
                       name_of(mapping.state());
    for (const auto& [flag, name] :
         {std::pair{&freed, "freed"}, {&has_backup, "has a backup"}, {&keeps_bytes, "keeps its bytes"}})
        if (*flag) text += std::string(", ") + name;
    return text;
}

SegmentTable& SegmentTable::get() {
    static SegmentTable* table = new SegmentTable;
    return *table;
}

SegmentPtr SegmentTable::allocate(size_t bytes, int device, const Pool& pool) {
    ContextScope context(device);
    const size_t whole = round_up(std::max<size_t>(bytes, 1), granularity(device));
    if (whole < bytes)
        throw InvalidState("cannot allocate " + std::to_string(bytes) + " bytes: more than the address space");
    if (const size_t margin = region_margin_; margin > 0 && pool.backup != BackupPlan::kByLevel)
        if (const size_t free_bytes = memory_info(device).free_bytes; free_bytes < whole || free_bytes - whole < margin)
            throw OutOfDeviceMemory(device, whole, free_bytes > margin ? free_bytes - margin : 0, "");
    SegmentPtr segment;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        segment = std::make_shared<Segment>(next_id_++, device, whole, pool);
    }
    try {
        segment->mapping.reserve();
        try {
            segment->mapping.map();
        } catch (const OutOfDeviceMemory&) {
            reclaim();  // memory that the driver refused to release earlier may be free now
            release_waiter(device);
            segment->mapping.map();
        }
    } catch (...) {
        destroy_or_defer(segment);
        throw;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    hand_out(segment);
    return segment;
}

void SegmentTable::hand_out(const SegmentPtr& segment) {
    by_address_.emplace(segment->mapping.address(), segment);
    count_handed_out(segment->mapping.device());
    check_valid(*segment);
}

// The segment at `address`, no longer handed out, and whether it is held, in which case the last release frees it.
std::pair<SegmentPtr, bool> SegmentTable::take_out(CUdeviceptr address) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = by_address_.find(address);
    if (found == by_address_.end()) {
        char text[128];
        snprintf(text, sizeof text,
                 "0x%llx is not the address of an allocation (already freed, or never allocated here)",
                 static_cast<unsigned long long>(address));
        throw InvalidState(text);
    }
    SegmentPtr segment = found->second;
    by_address_.erase(found);
    count_taken_back(segment->mapping.device());
    segment->freed = true;
    if (segment->has_backup) freed_.push_back(segment->id);
    return {segment, segment->holds > 0};
}

void SegmentTable::free(CUdeviceptr address) {
    const auto [segment, held] = take_out(address);
    if (held) return;
    try {
        destroy(*segment);
    } catch (const DriverError&) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (segment->mapping.state() == Mapping::State::kMapped) {
            segment->freed = false;
            hand_out(segment);
            throw;
        }
        deferred_.push_back(segment);  // partly taken down, so it is unusable; the rest is retried later
    }
    release_waiter(segment->mapping.device());  // only hooks free hundreds at once; for those, an operation releases it
}

bool SegmentTable::free_for_good(CUdeviceptr address) {
    const auto [segment, held] = take_out(address);
    if (!held) destroy_or_defer(segment);
    if (segment->has_backup) return true;
    std::lock_guard<std::mutex> lock(mutex_);
    return !deferred_.empty() || !unreleased_.empty();
}

void SegmentTable::note_backup(Segment& segment) {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool is_new = !segment.has_backup.exchange(true);
    if (is_new && segment.freed) freed_.push_back(segment.id);
}

// Giving back host memory takes driver calls, so what is freed while they are suspended is told afterwards.
std::vector<uint64_t> SegmentTable::take_freed() {
    if (driver_calls_suspended()) return {};
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(freed_, {});
}

bool SegmentTable::has_freed() const {
    if (driver_calls_suspended()) return false;
    std::lock_guard<std::mutex> lock(mutex_);
    return !freed_.empty();
}

SegmentPtr SegmentTable::find(CUdeviceptr address) const {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = by_address_.upper_bound(address);
    if (found == by_address_.begin()) return nullptr;
    --found;
    return address - found->first < found->second->mapping.bytes() ? found->second : nullptr;
}

std::vector<SegmentPtr> SegmentTable::segments() const {
    return segments([](const Segment&) { return true; });
}

std::vector<SegmentPtr> SegmentTable::segments(const std::function<bool(const Segment&)>& wanted) const {
    if (Driver::is_open()) Driver::get();
    std::vector<SegmentPtr> found;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& [address, segment] : by_address_)
            if (wanted(*segment)) found.push_back(segment);
    }
    std::sort(found.begin(), found.end(), [](const SegmentPtr& a, const SegmentPtr& b) { return a->id < b->id; });
    return found;
}

std::vector<SegmentPtr> SegmentTable::hold(const std::vector<SegmentPtr>& segments) {
    std::vector<SegmentPtr> held;
    std::lock_guard<std::mutex> reclaiming(reclaiming_);
    std::lock_guard<std::mutex> lock(mutex_);
    for (const SegmentPtr& segment : segments) {
        if (segment->freed) continue;
        ++segment->holds;
        held.push_back(segment);
    }
    return held;
}

void SegmentTable::release(const std::vector<SegmentPtr>& segments) noexcept {
    std::vector<SegmentPtr> freed;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (const SegmentPtr& segment : segments)
            if (--segment->holds == 0 && segment->freed) freed.push_back(segment);
        check_valid(*this);
    }
    for (const SegmentPtr& segment : freed) destroy_or_defer(segment);
}

bool SegmentTable::is_valid() const {
    std::set<uint64_t> unreleased;
    for (const SegmentPtr& segment : unreleased_) unreleased.insert(segment->id);
    std::map<int, size_t> counts;
    for (const auto& [address, segment] : by_address_) {
        ++counts[segment->mapping.device()];
        if (segment->freed || segment->holds < 0 || address != segment->mapping.address()) return false;
        if (segment->holds == 0 && !segment->is_valid_at_rest(unreleased.count(segment->id) > 0)) return false;
    }
    const auto is_counted = [&](const auto& entry) { return counts[entry.first] == entry.second; };
    const std::map<int, size_t> handed_out = segment_counts();
    return std::all_of(handed_out.begin(), handed_out.end(), is_counted) &&
           std::all_of(deferred_.begin(), deferred_.end(), [](const auto& segment) { return segment->freed.load(); });
}

std::string SegmentTable::describe() const {
    std::string text = "the table of segments";
    for (const auto& [address, segment] : by_address_)
        text += "\n  " + segment->describe() + ", holds: " + std::to_string(segment->holds);
    return text;
}

size_t SegmentTable::reclaim() noexcept {
    if (!Driver::is_open() || Driver::is_forked() || driver_calls_suspended()) return 0;
    std::vector<SegmentPtr> deferred;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        deferred.swap(deferred_);
    }
    for (const SegmentPtr& segment : deferred) destroy_or_defer(segment);
    {
        std::lock_guard<std::mutex> reclaiming(reclaiming_);
        std::vector<SegmentPtr> unreleased;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            for (const SegmentPtr& segment : std::exchange(unreleased_, {})) {
                if (segment->holds > 0) {
                    unreleased_.insert(segment);
                } else if (!segment->freed && segment->sleep != Segment::Sleep::kAwake) {
                    ++segment->holds;  // so that it is not freed in the meantime
                    unreleased.push_back(segment);
                }
            }
        }
        detach_unused(unreleased);
        release_all(unreleased);
        release(unreleased);
    }
    const size_t mappings = reclaim_mappings();
    std::lock_guard<std::mutex> lock(mutex_);
    return deferred_.size() + unreleased_.size() + mappings;
}

void SegmentTable::destroy(Segment& segment) {
    ContextScope context(segment.mapping.device());
    if (segment.mapping.state() == Mapping::State::kMapped) wait_for_running_work(segment.mapping.device());
    segment.mapping.destroy();
    if (has_segments(segment.mapping.device())) return;
    release_waiter(segment.mapping.device());
    release_idle_streams(segment.mapping.device());
    release_idle_tables(segment.mapping.device());
}

void SegmentTable::destroy_or_defer(const SegmentPtr& segment) noexcept {
    const bool destroyed = try_twice([&] {
        try {
            destroy(*segment);
        } catch (const DriverError& error) {
            // At exit the driver may shut down before us; the memory went with its context.
            if (error.error != "CUDA_ERROR_DEINITIALIZED" && error.error != "CUDA_ERROR_CONTEXT_IS_DESTROYED") throw;
        }
        return true;
    });
    if (destroyed) return;
    std::lock_guard<std::mutex> lock(mutex_);
    deferred_.push_back(segment);
}

void set_free_listener(void (*listener)()) { free_listener = listener; }

}  // namespace cumem_sleep

using namespace cumem_sleep;

void* cumem_sleep_malloc(size_t bytes, int device, CUstream) {
    const DriverCalls whole;
    try {
        RelaxedCaptureScope relaxed;
        return reinterpret_cast<void*>(
            SegmentTable::get().allocate(bytes, device, pool_of_thread())->mapping.address());
    } catch (const OutOfDeviceMemory&) {
        return nullptr;  // expected: PyTorch frees its cache, retries, and raises its own error
    } catch (const std::exception& error) {
        fprintf(stderr, "cumem-sleep: allocation of %zu bytes on device %d: %s\n", bytes, device, error.what());
        return nullptr;
    }
}

void cumem_sleep_free(void* address, size_t, int, CUstream) {
    if (!address || Driver::is_forked()) return;
    const DriverCalls whole;  // if they are suspended, an operation frees it later
    try {
        const bool has_more = SegmentTable::get().free_for_good(reinterpret_cast<CUdeviceptr>(address));
        if (void (*listener)() = free_listener; listener && has_more) listener();
    } catch (const std::exception& error) {
        fprintf(stderr, "cumem-sleep: free: %s\n", error.what());
    }
}

bool cumem_sleep_wants() {
    if (Driver::is_forked() || pool_of_thread().backup == BackupPlan::kByLevel) return false;
    if (Driver::is_open()) return true;
    const std::string* const path = driver_to_open;
    if (!path) return false;
    try {
        Driver::open(*path);
        return true;
    } catch (const std::exception& error) {
        if (driver_to_open.exchange(nullptr)) fprintf(stderr, "cumem-sleep: nothing will sleep: %s\n", error.what());
        return false;
    }
}

bool cumem_sleep_owns(void* address) {
    const SegmentPtr segment = SegmentTable::get().find(reinterpret_cast<CUdeviceptr>(address));
    return segment && segment->mapping.address() == reinterpret_cast<CUdeviceptr>(address);
}
