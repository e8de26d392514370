#include "tasks.h"

#include "thread_role.h"
#include "threads.h"

namespace cumem_sleep {

AheadTask map_task(const SegmentPtr& segment) {
    return {[segment] { segment->map(); }};
}

AheadTask prefault_task(const std::shared_ptr<HostBlock>& block, size_t offset, size_t bytes) {
    return {[block, offset, bytes] { block->prefault(offset, bytes); }};
}

void wait_for(Ahead& ahead, uint64_t key) {
    do stop_if_asked();  // first, because tasks that no thread was given run here
    while (!ahead.wait(key, kBetweenLooks));
}

}  // namespace cumem_sleep
