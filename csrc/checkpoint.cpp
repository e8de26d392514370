#include "checkpoint.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

namespace cumem_sleep {

namespace {

constexpr int kOldestDriver = 12080;

template <typename Function, typename... Args>
void call_if_supported(const Call<Function>& call, Args... args) {
    const Driver& driver = Driver::get();
    if (!can_checkpoint())
        throw DriverError(call.name, "CUDA_ERROR_NOT_SUPPORTED",
                          "checkpointing processes needs CUDA 12.8, but the driver supports CUDA " +
                              version_text(driver.version()) + ": update the NVIDIA driver to 570 or newer");
    call(args...);
}

// Rounded up, so that a short timeout does not become 0, which means none.
unsigned int milliseconds(double seconds) {
    if (!(seconds > 0))
        throw std::invalid_argument("timeout_s=" + std::to_string(seconds) + ": expected a number greater than 0");
    constexpr double kMost = std::numeric_limits<unsigned int>::max();
    return static_cast<unsigned int>(std::min(std::ceil(seconds * 1000), kMost));
}

}  // namespace

bool can_checkpoint() {
    const Driver& driver = Driver::get();
    return driver.version() >= kOldestDriver && driver.checkpoint_unlock.found();  // all came with one version
}

ProcessState process_state(int pid) {
    CUprocessState state = CU_PROCESS_STATE_FAILED;
    call_if_supported(Driver::get().checkpoint_get_state, pid, &state);
    return static_cast<ProcessState>(state);
}

void lock_process(int pid, double timeout_s) {
    CUcheckpointLockArgs args{};
    args.timeoutMs = milliseconds(timeout_s);
    call_if_supported(Driver::get().checkpoint_lock, pid, &args);
}

void checkpoint_process(int pid) { call_if_supported(Driver::get().checkpoint_checkpoint, pid, nullptr); }

void restore_process(int pid) { call_if_supported(Driver::get().checkpoint_restore, pid, nullptr); }

void unlock_process(int pid) { call_if_supported(Driver::get().checkpoint_unlock, pid, nullptr); }

}  // namespace cumem_sleep
