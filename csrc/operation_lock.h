// Operations: calls of Python that signals must not disturb, each on its own thread, and the lock that serialises them.
//
// Python runs signal handlers on the main thread, between any two of its steps, and raises their exceptions there. So
// no code on that thread can be sure to clean up. An operation therefore runs on its own thread, where no handler runs,
// and its caller waits here, without the interpreter lock, until it has ended: then signals are handled. Only while the
// operation itself waits for others (`stop_if_asked` of thread_role.h) may handlers run, and what they raise end it.
#pragma once

#include <Python.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace cumem_sleep {

// The lock that serialises operations. An object (`LockGuard`) holds it, so that an error at any moment releases it. It
// is not reentrant: a finaliser that the garbage collector runs must not begin an operation inside another.
class OperationLock {
  public:
    // Waits if `wait`, and checks for requests to stop meanwhile; otherwise returns false if it would have to wait.
    // Throws InvalidState where it would wait forever: the calling thread has the lock, or the thread that has it waits
    // for the calling thread. Called with the interpreter lock held.
    bool acquire(bool wait);
    void release();

    // Calls `work` on a thread of its own and returns its result (a new reference) or throws what it raised; or what a
    // signal handler raised while it waited for others, whatever its outcome. Calls `work` on this thread instead if no
    // thread can be started (signals may interrupt it then), or if this thread belongs to the layer or has the lock.
    PyObject* run(PyObject* work);

  private:
    bool held_by_this_thread();

    std::mutex mutex_;
    std::condition_variable released_;
    bool held_ = false;
    std::thread::id owner_;
};

class LockGuard {
  public:
    LockGuard(std::shared_ptr<OperationLock> lock, bool wait)
        : lock_(lock->acquire(wait) ? std::move(lock) : nullptr) {}
    ~LockGuard() { release(); }
    LockGuard(const LockGuard&) = delete;
    LockGuard& operator=(const LockGuard&) = delete;

    explicit operator bool() const { return lock_ != nullptr; }
    void release() {
        if (lock_) std::exchange(lock_, nullptr)->release();
    }

  private:
    std::shared_ptr<OperationLock> lock_;
};

// As `OperationLock::run`, for callbacks that Python runs at an arbitrary place: errors are reported as unraisable,
// like those of finalisers. False, with Python's error: no `Exception`, such as a KeyboardInterrupt of this thread.
bool run_callback(PyObject* work);

}  // namespace cumem_sleep
