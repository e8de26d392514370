#include "waiting.h"

#include <cuda.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "driver.h"

namespace cumem_sleep {

namespace {

// What `wait_for_running_work` needs on one device. Each device has its own lock: a thread that waits for one device
// must not keep another thread from freeing memory on a second one, whose work the first may depend on.
struct Waiter {
    static constexpr size_t kPage = 4096;

    std::mutex mutex;
    // One byte that stays allocated: without it, each wait would take a page from the device and give it back.
    CUdeviceptr neighbour = 0;
    CUdeviceptr unfreed = 0;     // the driver refused to free it; the next wait reuses it, or `release_waiter` frees it
    bool is_registered = false;  // the driver refused to unregister the page; the next wait retries
    std::mutex left_mutex;       // who comes while another waits for that work waits, too
    std::atomic<bool> has_work_left{false};
    alignas(kPage) uint8_t page[kPage];
};

std::mutex waiters_mutex;
auto* const waiters = new std::map<int, Waiter>;  // never destroyed: memory may be freed at exit

Waiter& waiter_of(int device) {
    std::lock_guard<std::mutex> lock(waiters_mutex);
    return (*waiters)[device];
}

}  // namespace

void wait_for_running_work(int device) {
    ContextScope scope(device);
    RelaxedCaptureScope relaxed;
    const Driver& driver = Driver::get();
    Waiter& waiter = waiter_of(device);
    std::lock_guard<std::mutex> lock(waiter.mutex);
    if (!waiter.neighbour && driver.mem_alloc.attempt(&waiter.neighbour, 1) != CUDA_SUCCESS) waiter.neighbour = 0;
    const CUresult result = waiter.unfreed ? CUDA_SUCCESS : driver.mem_alloc.attempt(&waiter.unfreed, 1);
    if (result == CUDA_SUCCESS) {
        driver.mem_free(waiter.unfreed);
        waiter.unfreed = 0;
        return;
    }
    if (result != CUDA_ERROR_OUT_OF_MEMORY) driver.fail(driver.mem_alloc.name, result);
    // The device is full. Unregistering host memory also waits and needs no device memory, but costs 100 us.
    if (!waiter.is_registered) driver.mem_host_register(waiter.page, Waiter::kPage, CU_MEMHOSTREGISTER_PORTABLE);
    waiter.is_registered = true;
    CUresult unregistered = driver.mem_host_unregister.attempt(waiter.page);
    if (unregistered != CUDA_SUCCESS) unregistered = driver.mem_host_unregister.attempt(waiter.page);
    if (unregistered != CUDA_SUCCESS) driver.fail(driver.mem_host_unregister.name, unregistered);
    waiter.is_registered = false;
}

void note_work_left(int device) noexcept { waiter_of(device).has_work_left = true; }

void wait_for_work_left(int device) {
    Waiter& waiter = waiter_of(device);
    std::lock_guard<std::mutex> lock(waiter.left_mutex);
    std::atomic<bool>& has_work_left = waiter.has_work_left;
    if (!has_work_left.exchange(false)) return;
    try {
        wait_for_running_work(device);
    } catch (...) {
        has_work_left = true;
        throw;
    }
}

void release_waiter(int device) noexcept {
    Waiter& waiter = waiter_of(device);
    std::lock_guard<std::mutex> lock(waiter.mutex);
    for (CUdeviceptr* const byte : {&waiter.neighbour, &waiter.unfreed}) {
        const bool freed = !*byte || try_twice([&] {
            ContextScope scope(device);
            RelaxedCaptureScope relaxed;
            return Driver::get().mem_free.attempt(*byte) == CUDA_SUCCESS;
        });
        if (freed) *byte = 0;
    }
}

}  // namespace cumem_sleep
