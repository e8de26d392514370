#include "segment_counts.h"

#include <mutex>

namespace cumem_sleep {

namespace {

std::mutex mutex;
auto* const counts = new std::map<int, size_t>;  // never destroyed: memory may be freed at exit

}  // namespace

void count_handed_out(int device) {
    std::lock_guard<std::mutex> lock(mutex);
    ++(*counts)[device];
}

void count_taken_back(int device) noexcept {
    std::lock_guard<std::mutex> lock(mutex);
    --counts->find(device)->second;
}

bool has_segments(int device) noexcept {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = counts->find(device);
    return found != counts->end() && found->second > 0;
}

std::map<int, size_t> segment_counts() {
    std::lock_guard<std::mutex> lock(mutex);
    return *counts;
}

}  // namespace cumem_sleep
