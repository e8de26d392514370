// Operations: calls of Python that signals must not disturb, each on its own thread, and the lock that serialises them.
//
// Python runs signal handlers on the main thread, between any two of its steps, and raises their exceptions there, any
// number of times. So no code on that thread can be sure to clean up. An operation therefore runs on its own thread,
// where no handler runs. The caller waits here without the interpreter lock and lets signal handlers run. It takes a
// handler's first exception as a request to stop, and raises it when the operation has ended. The operation checks for
// that request (`stop_if_asked` of thread_role.h) where it can still undo everything, and nowhere else.
//
// Who takes which error:
//                      what `work` raises             what signal handlers raise meanwhile
//   OperationLock::run  the caller                     the caller, instead; `work` is asked to stop
//   call_undisturbed    reported as unraisable         nobody yet: handlers run afterwards
//
// Where no thread can be started, an operation runs on its caller's. Handlers run in the middle of it then, but what
// they raise is kept for its end (`HandlersRaiseLater`), and the table holds. What they raise in `call_undisturbed`,
// its caller gets.
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

    // Calls `work` on a thread of its own and returns its result (a new reference) or throws what it raised. If signal
    // handlers raised meanwhile, throws the first of their exceptions once `work` has ended, whatever its outcome.
    // Calls `work` on this thread instead if no thread can be started (with the same outcomes), or if this thread
    // belongs to the layer or has the lock.
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

// Calls `work` on a thread of its own and lets signal handlers run only afterwards: for callbacks that Python runs at
// an arbitrary place. Errors are reported as unraisable, like those of finalisers. If no thread can be started, `work`
// and the handlers run here; if a handler raises, that is Python's error when `work` has ended, and this returns false.
bool call_undisturbed(PyObject* work);

}  // namespace cumem_sleep
