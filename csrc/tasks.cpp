#include "tasks.h"

namespace cumem_sleep {

ThreadPoolTask map_task(const SegmentPtr& segment) {
    return {[segment] { segment->map(); }};
}

ThreadPoolTask prefault_task(const std::shared_ptr<HostBlock>& block, size_t offset, size_t bytes) {
    return {[block, offset, bytes] { block->prefault(offset, bytes); }};
}

}  // namespace cumem_sleep
