// Tasks for the threads of `ThreadPool`.
#pragma once

#include <cstddef>
#include <memory>

#include "allocator.h"
#include "host_memory.h"
#include "thread_pool.h"

namespace cumem_sleep {

struct ThreadPoolTask {
    ThreadPool::Task task;
};

// Maps physical memory under the segment, which must be held.
ThreadPoolTask map_task(const SegmentPtr& segment);
ThreadPoolTask prefault_task(const std::shared_ptr<HostBlock>& block, size_t offset, size_t bytes);

}  // namespace cumem_sleep
