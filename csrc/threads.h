// Threads of the layer, and what they wait for. Nothing here uses the interpreter.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>

namespace cumem_sleep {

// How long a thread that handles signals waits at a time. A signal delivered to that thread ends the wait at once; the
// kernel delivers signals for the process to the main thread whenever it can.
constexpr std::chrono::milliseconds kBetweenLooks{50};

// Something that happens once. It uses no mutex, so none can be left locked.
class Event {
  public:
    // The object may be destroyed as soon as another thread sees that it is set.
    void set() noexcept;
    bool is_set() const noexcept { return word_.load(std::memory_order_acquire) != 0; }
    // Waits at most this long; returns early if a signal handler ran on this thread. Returns whether it is set.
    bool wait(std::chrono::nanoseconds at_most) const noexcept;

  private:
    std::atomic<uint32_t> word_{0};
};

// Starts a thread with this name (15 characters at most) that blocks signals. Throws std::system_error, or
// std::bad_alloc, if no thread can be started.
std::thread start_thread(const std::string& name, std::function<void()> work);

// For tests: only this many more threads can be started; a negative number lifts the limit.
void allow_threads(int count) noexcept;

}  // namespace cumem_sleep
