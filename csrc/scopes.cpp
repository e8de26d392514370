#include "scopes.h"

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

}  // namespace cumem_sleep
