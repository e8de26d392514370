// Threads of the layer, and what they wait for. Nothing here uses the interpreter.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

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

// One piece of work on a thread named `cumem-operation`, started as above. When that is done the thread waits for more
// work of this kind, a second at most, because to start and to end one takes longer than a small operation. So the work
// leaves the thread's state as it was, and returns whether it could; if not, the thread ends. At most one waits.
//
// Once started, the work must have ended before this object is destroyed.
class OperationThread {
  public:
    // Throws as `start_thread`.
    void start(std::function<bool()> work);
    // Waits as `Event::wait`.
    void wait(std::chrono::nanoseconds at_most);
    bool has_ended() const noexcept { return has_ended_; }

  private:
    friend class IdleThread;

    std::function<bool()> work_;
    Event ended_;
    bool stays_ = false;  // known once it has ended
    bool has_ended_ = false;
    std::thread thread_;  // unless one had waited
};

// The name of this thread, if it was started here, or "".
const char* thread_name();

// The names of all threads started here that are at work; in a forked child, those of its parent.
std::vector<std::string> thread_names();

// For tests: only this many more threads can be started, and none waits for work; a negative number lifts the limit.
void allow_threads(int count) noexcept;

}  // namespace cumem_sleep
