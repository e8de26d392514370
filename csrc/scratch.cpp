#include "scratch.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "driver.h"

namespace cumem_sleep {

namespace {

std::mutex refused_mutex;
auto* const refused = new std::vector<std::unique_ptr<Mapping>>;  // never destroyed: scratch may be closed at exit

bool destroyed(Mapping& mapping) noexcept {
    return try_twice([&] {
        ContextScope context(mapping.device());
        RelaxedCaptureScope relaxed;
        mapping.destroy();
        return true;
    });
}

}  // namespace

Scratch::Scratch(int device, size_t bytes) : mapping_(std::make_unique<Mapping>(device, bytes)), bytes_(bytes) {
    try {
        ContextScope context(device);
        RelaxedCaptureScope relaxed;
        mapping_->reserve();
        mapping_->map();
        address_ = mapping_->address();
    } catch (...) {
        close();
        throw;
    }
}

void Scratch::close() noexcept {
    if (Driver::is_forked() || !mapping_) return;
    std::unique_ptr<Mapping> mapping = std::move(mapping_);
    if (destroyed(*mapping)) return;
    std::lock_guard<std::mutex> lock(refused_mutex);
    refused->push_back(std::move(mapping));
}

size_t reclaim_scratch() noexcept {
    std::lock_guard<std::mutex> lock(refused_mutex);
    const auto gone = [](const std::unique_ptr<Mapping>& mapping) { return destroyed(*mapping); };
    refused->erase(std::remove_if(refused->begin(), refused->end(), gone), refused->end());
    return refused->size();
}

}  // namespace cumem_sleep
