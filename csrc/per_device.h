// `PerDevice`: what is made once for each device, by one thread while those of other devices go on.
#pragma once

#include <map>
#include <mutex>

namespace cumem_sleep {

// The lock is the device's own: the driver may need seconds for a context where much host memory is registered.
template <typename Thing>
class PerDevice {
  public:
    // Calls `use` with the thing of this device, which it has to itself meanwhile; first of all it is `Thing{}`.
    template <typename Use>
    auto with(int device, Use use) {
        Locked& locked = find(device);
        const std::lock_guard<std::mutex> lock(locked.mutex);
        return use(locked.thing);
    }

  private:
    struct Locked {
        std::mutex mutex;
        Thing thing{};
    };

    Locked& find(int device) {
        const std::lock_guard<std::mutex> lock(mutex_);
        return by_device_[device];  // stays where it is when others come
    }

    std::mutex mutex_;
    std::map<int, Locked> by_device_;
};

}  // namespace cumem_sleep
