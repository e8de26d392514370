#include "holds.h"

#include "interpreter.h"

namespace cumem_sleep {

void HeldSegments::release() noexcept {
    SegmentTable::get().release(segments_);
    segments_.clear();
}

Allocation::~Allocation() {
    if (!address_) return;
    const WithoutInterpreter unlocked;
    cumem_sleep_free(reinterpret_cast<void*>(address_), 0, 0, nullptr);
}

void ThreadLabel::restore() {
    if (std::exchange(active_, false) && thread_ == std::this_thread::get_id()) exchange_thread_label(outer_);
}

}  // namespace cumem_sleep
