#include "scratch.h"

#include <map>
#include <mutex>
#include <utility>

#include "driver.h"

namespace cumem_sleep {

namespace {

// Never destroyed: scratch may be closed at exit.
std::mutex open_mutex;
auto* const open_by_address = new std::map<CUdeviceptr, const Mapping*>;

}  // namespace

Scratch::Scratch(int device, size_t bytes, const std::vector<int>& peers)
    : mapping_(std::make_unique<Mapping>(device, bytes)), bytes_(bytes) {
    for (const int peer : peers) mapping_->share_with(peer);
    try {
        ContextScope context(device);
        RelaxedCaptureScope relaxed;
        mapping_->reserve();
        mapping_->map();
        std::lock_guard<std::mutex> lock(open_mutex);
        open_by_address->emplace(mapping_->address(), mapping_.get());
        address_ = mapping_->address();
    } catch (...) {
        close();
        throw;
    }
}

void Scratch::close() noexcept {
    if (Driver::is_forked() || !mapping_) return;
    {
        std::lock_guard<std::mutex> lock(open_mutex);
        open_by_address->erase(mapping_->address());
    }
    give_back(std::move(mapping_));
}

void with_scratch_at(CUdeviceptr address, const std::function<void(const Mapping&)>& use) {
    std::lock_guard<std::mutex> lock(open_mutex);
    const auto next = open_by_address->upper_bound(address);
    if (next == open_by_address->begin()) return;
    const Mapping& mapping = *std::prev(next)->second;
    if (address - mapping.address() < mapping.bytes()) use(mapping);
}

}  // namespace cumem_sleep
