// Tasks for the threads of `Ahead`: C++ only in production; tests pass Python functions.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
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
AheadTask python_task(pybind11::object work);

// Waits for the tasks of `key`, and checks for requests to stop meanwhile. Called without the interpreter lock.
void wait_for(Ahead& ahead, uint64_t key);

// Converts a dictionary {key: [AheadTask, ...]}.
Ahead::Tasks tasks_of(const pybind11::dict& tasks);

}  // namespace cumem_sleep
