// `Worker`: a background thread that calls Python.
#pragma once

#include <Python.h>
#include <sys/types.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "threads.h"

namespace cumem_sleep {

// A background thread that works until it is asked to stop. All methods but `start` may be called on any thread, its
// own included. In a forked child, where the thread does not exist, it counts as ended.
class Worker : public std::enable_shared_from_this<Worker> {
  public:
    explicit Worker(std::string name);

    // Calls `work` on the thread, once. Throws InvalidState if no thread can be started.
    void start(PyObject* work);
    bool running() const noexcept;
    void ask_to_stop() noexcept { asked_.set(); }
    bool asked_to_stop() const noexcept { return asked_.is_set(); }
    // Waits until it is asked to stop, but no longer than this; returns whether it was.
    bool pause(double seconds) const;
    // Waits until it has ended, and checks for requests to stop meanwhile; returns whether it has ended.
    bool wait(std::optional<double> timeout_s) const;
    // Asks it to stop and waits until it has; on its own thread only asks.
    void stop();

  private:
    void perform(PyObject* work) noexcept;

    const std::string name_;
    const pid_t process_;
    std::atomic<bool> started_{false};
    Event asked_, ended_;
};

}  // namespace cumem_sleep
