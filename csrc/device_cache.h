// `DeviceCache`: what takes as long to make for a small operation as for a large one, kept from one to the next.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace cumem_sleep {

// A few things of each device, kept only as long as the device has segments. A thread that has kept one therefore looks
// afterwards whether there still are any (`has_segments`), and the thread that frees the last takes all.
template <typename Thing>
class DeviceCache {
  public:
    // `most`: of each device.
    explicit DeviceCache(size_t most) : most_(most) {}

    // One that was kept, which from then on is the caller's alone.
    std::optional<Thing> take(int device) {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::vector<Thing>& things = things_[device];
        things.reserve(most_);  // so that to keep one never fails
        if (things.empty()) return std::nullopt;
        std::optional<Thing> last(std::move(things.back()));
        things.pop_back();
        return last;
    }
    // False if there is no room, or none was ever asked for.
    bool keep(int device, const Thing& thing) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = things_.find(device);
        if (found == things_.end() || found->second.size() >= most_) return false;
        found->second.push_back(thing);
        return true;
    }
    std::vector<Thing> take_all(int device) noexcept {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = things_.find(device);
        std::vector<Thing> all;
        if (found == things_.end()) return all;
        all.swap(found->second);
        things_.erase(found);
        return all;
    }

  private:
    const size_t most_;
    std::mutex mutex_;
    std::map<int, std::vector<Thing>> things_;  // by device
};

}  // namespace cumem_sleep
