#include "operation_lock.h"

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

  private:
    const Driver* driver_;
    CUcontext context_ = nullptr;
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
    bool has_mode_ = false;
};

using Error = std::unique_ptr<py::error_already_set>;

// What Python has just raised; null if there is no memory for it.
Error raised() noexcept {
    try {
        return std::make_unique<py::error_already_set>();
    } catch (const std::exception&) {
        PyErr_Clear();
        return nullptr;
    }
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
    if (thread_role.stopping || thread_role.worker || is_finalizing() || held_by_this_thread())
        return work().release().ptr();
    const auto variables = py::reinterpret_steal<py::object>(PyContext_CopyCurrent());
    if (!variables) throw py::error_already_set();
    const CudaThreadState cuda;
    Stopping stopping;
    Event ended;
    py::object result;
    Error error, of_handler;
    std::thread thread;
    try {
        thread = start_thread("cumem-operation", [&] {
            try {
                cuda.apply();
                thread_role.stopping = &stopping;
                const PyGILState_STATE state = PyGILState_Ensure();
                const bool entered = PyContext_Enter(variables.ptr()) == 0;
                result = py::reinterpret_steal<py::object>(entered ? PyObject_CallNoArgs(work.ptr()) : nullptr);
                if (!result) error = raised();
                if (entered && PyContext_Exit(variables.ptr()) != 0) PyErr_Clear();
                PyGILState_Release(state);
                ended.set();
            } catch (abi::__forced_unwind&) {
                stay_until_the_process_ends();
            }
        });
    } catch (const std::exception&) {
        return work().release().ptr();
    }
    while (thread.joinable()) {
        if (stopping.caller_runs_handlers.exchange(false) && !of_handler && handlers_raise()) {
            of_handler = raised();
            stopping.is_asked = true;
        }
        const WithoutInterpreter unlocked;
        while (!ended.wait(kBetweenLooks) && !stopping.caller_runs_handlers) continue;
        if (ended.is_set()) thread.join();
    }
    if (const Error& first = of_handler ? of_handler : error) throw py::error_already_set(*first);
    if (!result) throw std::bad_alloc();
    return result.release().ptr();
}

bool run_callback(PyObject* called) {
    static OperationLock lock;  // that nobody has
    const auto work = py::reinterpret_borrow<py::object>(called);
    try {
        Py_DECREF(lock.run(called));
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
