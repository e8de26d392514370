// Tasks for the threads of `Ahead`.
#pragma once

#include <cstddef>
#include <memory>

#include "ahead.h"
#include "allocator.h"
#include "host_memory.h"

namespace cumem_sleep {

struct AheadTask {
    Ahead::Task task;
};

// Maps physical memory under the segment, which must be held.
AheadTask map_task(const SegmentPtr& segment);
AheadTask prefault_task(const std::shared_ptr<HostBlock>& block, size_t offset, size_t bytes);

}  // namespace cumem_sleep
