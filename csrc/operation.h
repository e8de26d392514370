// What Python's threads and signals may not disturb: operations, each on a thread of its own; the lock that serialises
// them; threads that work in the background.
//
// Python runs signal handlers on the main thread, between any two of its steps, and raises there what they raise: any
// number of times, so that no code of that thread can clear up for certain. An operation therefore runs on a thread of
// its own, which no handler runs on. The caller waits here, without the interpreter lock, lets signals be handled, and
// takes the first exception of a handler as the wish to stop; it is raised when the operation has ended. The operation
// looks for that wish (`stop_if_asked`) where it can still undo everything, and nowhere else.
#pragma once

#include <pybind11/pybind11.h>

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "threads.h"

namespace cumem_sleep {

// The operation was asked to stop. In Python it is no `Exception`: nothing that tries something out may take it for a
// failure of that.
class OperationStopped : public std::exception {
  public:
    const char* what() const noexcept override { return "the operation was asked to stop"; }
};

// On the thread of an operation: throws OperationStopped if it was asked to stop. On one of Python's: lets signals be
// handled, and throws what a handler raised. Called without the interpreter lock.
void stop_if_asked();

// The lock that serialises operations. Holding it is an object, so that an error at any moment releases it. It is not
// reentrant: what the garbage collector runs, must not begin an operation inside another.
class OperationLock {
  public:
    // Waits, and looks for the wish to stop meanwhile, if `wait`; else returns false where it would have to. Throws
    // InvalidState where it would wait for ever: the calling thread holds it, or its holder waits for that thread.
    // Called with the interpreter lock.
    bool acquire(bool wait);
    void release();

    // Calls `work` on a thread of its own and returns what it returned, or throws what it raised; or, if handlers of
    // signals raised meanwhile, the first of that when `work` has ended, whatever became of it. In place instead where
    // no thread can be had, where this one is the layer's own, or where it holds the lock.
    pybind11::object run(const pybind11::object& work);

  private:
    bool held_by_this_thread();

    std::mutex mutex_;
    std::condition_variable released_;
    bool held_ = false;
    std::thread::id owner_;
};

class Held {
  public:
    Held(std::shared_ptr<OperationLock> lock, bool wait) : lock_(lock->acquire(wait) ? std::move(lock) : nullptr) {}
    ~Held() { release(); }
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

    explicit operator bool() const { return lock_ != nullptr; }
    void release() {
        if (lock_) std::exchange(lock_, nullptr)->release();
    }

  private:
    std::shared_ptr<OperationLock> lock_;
};

// Calls `work` on a thread of its own, and lets signals be handled afterwards: for what Python calls at a place of its
// own choosing. Errors are told as those of finalisers are. Where no thread can be had, throws what signal handlers
// raised: anything but an error of this package.
void call_undisturbed(const pybind11::object& work);

// A thread that works in the background until it is asked to stop. All but `start` may be called on any thread, its own
// included. A child of a fork has no such thread, and finds that it has ended.
class Worker : public std::enable_shared_from_this<Worker> {
  public:
    explicit Worker(std::string name);

    // Calls `work` on the thread, once. Throws InvalidState if none can be had.
    void start(const pybind11::object& work);
    bool running() const noexcept;
    void ask_to_stop() noexcept { asked_.set(); }
    bool asked_to_stop() const noexcept { return asked_.is_set(); }
    bool is_this_thread() const noexcept;
    // Waits until it is asked to stop, at most so long; returns whether it was.
    bool pause(double seconds) const;
    // Waits until it has ended, and looks for the wish to stop meanwhile; returns whether it has.
    bool wait(std::optional<double> timeout_s) const;
    // Asks it to stop and waits, but not for itself.
    void stop();

  private:
    void perform(PyObject* work) noexcept;

    const std::string name_;
    const pid_t process_;
    std::atomic<bool> started_{false};
    Event asked_, ended_;
};

}  // namespace cumem_sleep
