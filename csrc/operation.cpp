#include "operation.h"

#include <pybind11/pybind11.h>

#include <chrono>
#include <new>
#include <utility>

#include "driver.h"
#include "interpreter.h"
#include "thread_role.h"
#include "threads.h"
#include "worker.h"

namespace py = pybind11;

namespace cumem_sleep {

namespace {

// CUDA's per-thread state, to be applied on another thread: the current context and the capture mode.
class CudaThreadState {
  public:
    CudaThreadState() : driver_(Driver::is_open() && !Driver::is_forked() ? &Driver::get() : nullptr) {
        if (!driver_) return;
        driver_->ctx_get_current.attempt(&context_);
        has_mode_ = driver_->exchange_capture_mode.attempt(&mode_) == CUDA_SUCCESS;
        CUstreamCaptureMode mine = mode_;
        if (has_mode_) driver_->exchange_capture_mode.attempt(&mine);
    }
    void apply() const {
        if (context_) driver_->ctx_set_current.attempt(context_);
        CUstreamCaptureMode mode = mode_;
        if (has_mode_) driver_->exchange_capture_mode.attempt(&mode);
    }
    // Leaves the thread as a new one is; false if it could not, or if this object does not know how it is.
    static bool reset() {
        if (!Driver::is_open() || Driver::is_forked()) return false;
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
        const Driver& driver = Driver::get();
        return driver.ctx_set_current.attempt(nullptr) == CUDA_SUCCESS &&
               driver.exchange_capture_mode.attempt(&mode) == CUDA_SUCCESS;
    }

  private:
    const Driver* driver_;
    CUcontext context_ = nullptr;
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
    bool has_mode_ = false;
};

// One call on a thread that nothing else uses meanwhile, which gets the caller's context variables and CUDA's
// per-thread state. Once started, it must have ended before this object is destroyed. All is called by the caller, with
// the interpreter lock held.
class Operation {
  public:
    explicit Operation(const py::object& work)
        : work_(work), variables_(py::reinterpret_steal<py::object>(PyContext_CopyCurrent())) {
        if (!variables_) throw py::error_already_set();
    }

    // Whether this thread may have one: not if it is the layer's own, nor while Python exits.
    static bool is_possible() { return !thread_role.stopping && !thread_role.worker && !is_finalizing(); }

    // False if no thread can be started. Otherwise waits, as `outcome`: if it took the interpreter lock before, the
    // thread would have to wait for that.
    bool start() {
        const WithoutInterpreter unlocked;
        try {
            thread_.start([this] { return perform(); });
        } catch (const std::exception&) {
            return false;
        }
        wait();
        return true;
    }

    // Waits until it has ended; returns what it returned, or throws what it raised. While the operation itself waits
    // for others, signal handlers run. If one raises, the operation is asked to stop, and that is thrown when it has
    // ended.
    py::object outcome() {
        Error of_handler;
        while (!thread_.has_ended()) {
            if (stopping_.callers_turn.exchange(false) && !of_handler && handlers_raise()) {
                of_handler = std::make_unique<py::error_already_set>();
                stopping_.is_asked = true;
            }
            const WithoutInterpreter unlocked;
            wait();
        }
        if (const Error& error = of_handler ? of_handler : error_) throw py::error_already_set(*error);
        if (!result_) throw std::bad_alloc();
        return std::move(result_);
    }

  private:
    using Error = std::unique_ptr<py::error_already_set>;

    // Until it has ended, or signal handlers are to run. Without the interpreter lock.
    void wait() {
        do thread_.wait(kBetweenLooks);
        while (!thread_.has_ended() && !stopping_.callers_turn);
    }

    // Returns whether the thread is left as it was.
    bool perform() noexcept {
        try {
            cuda_.apply();
            thread_role.stopping = &stopping_;
            const PyGILState_STATE state = PyGILState_Ensure();
            const bool entered = PyContext_Enter(variables_.ptr()) == 0;
            result_ = py::reinterpret_steal<py::object>(entered ? PyObject_CallNoArgs(work_.ptr()) : nullptr);
            if (!result_) keep_error();
            if (entered && PyContext_Exit(variables_.ptr()) != 0) PyErr_Clear();
            PyGILState_Release(state);
            thread_role.stopping = nullptr;
            return CudaThreadState::reset();
        } catch (abi::__forced_unwind&) {
            stay_until_the_process_ends();
        }
    }

    void keep_error() noexcept {
        try {
            error_ = std::make_unique<py::error_already_set>();
        } catch (const std::exception&) {  // no memory for it: `outcome` says so
            PyErr_Clear();
        }
    }

    const py::object& work_;
    const py::object variables_;
    const CudaThreadState cuda_;
    Stopping stopping_;
    OperationThread thread_;
    py::object result_;
    Error error_;
};

// Where no thread can be started, or this one may have none, on this one.
py::object run_apart(const py::object& work) {
    if (!Operation::is_possible()) return work();
    Operation operation(work);
    return operation.start() ? operation.outcome() : work();
}

}  // namespace

bool OperationLock::acquire(bool wait) {
    const WithoutInterpreter unlocked;
    for (;;) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            const bool own = held_ && owner_ == std::this_thread::get_id();
            if (own && wait)
                throw InvalidState(
                    "called from inside another operation of the allocator on the same thread (by a signal handler, or "
                    "a finaliser): call it after that one has returned");
            if (!own && wait) released_.wait_for(lock, kBetweenLooks, [this] { return !held_; });
            if (!held_) {
                held_ = true;
                owner_ = std::this_thread::get_id();
                return true;
            }
            if (!wait) return false;
        }
        if (is_finalizing())
            throw InvalidState(
                "called by a finaliser while Python exits, which has ended a thread in the middle of an operation: let "
                "threads end before the program does");
        if (thread_role.worker && thread_role.worker->asked_to_stop())
            throw InvalidState(
                "called by a finaliser on a thread of the allocator while another operation waits for that thread to "
                "end: call it elsewhere");
        stop_if_asked();
    }
}

void OperationLock::release() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        held_ = false;
    }
    released_.notify_one();
}

bool OperationLock::held_by_this_thread() {
    std::lock_guard<std::mutex> lock(mutex_);
    return held_ && owner_ == std::this_thread::get_id();
}

PyObject* OperationLock::run(PyObject* called) {
    const auto work = py::reinterpret_borrow<py::object>(called);
    return (held_by_this_thread() ? work() : run_apart(work)).release().ptr();
}

bool run_callback(PyObject* called) {
    const auto work = py::reinterpret_borrow<py::object>(called);
    try {
        run_apart(work);
        return true;
    } catch (py::error_already_set& error) {
        if (error.matches(PyExc_Exception)) {
            error.discard_as_unraisable(work);
            return true;
        }
        error.restore();
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    }
    return false;
}

}  // namespace cumem_sleep
