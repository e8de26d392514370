#include "operation.h"

#include <chrono>
#include <new>
#include <utility>

#include "driver.h"
#include "errors.h"
#include "interpreter.h"
#include "signal_errors.h"
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

using Error = std::unique_ptr<py::error_already_set>;

// What Python has just raised. OperationStopped loses its traceback here. Otherwise the caller's thread would clear the
// traceback's frames and close their generators; a signal handler could run in the middle of that, and its exception
// would be lost.
Error raised() {
    auto error = std::make_unique<py::error_already_set>();
    if (!error->matches(operation_stopped())) return error;
    PyErr_SetNone(operation_stopped());
    return std::make_unique<py::error_already_set>();
}

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
    static bool is_possible() { return !thread_role.operation_asked && !thread_role.worker && !is_finalizing(); }

    // False if no thread can be started. Otherwise waits, as `wait`: if it took the interpreter lock before, the thread
    // would have to wait for that.
    bool start() {
        const WithoutInterpreter unlocked;
        try {
            thread_.start([this] { return perform(); });
        } catch (const std::exception&) {
            return false;
        }
        thread_.wait(kBetweenLooks);
        return true;
    }
    // For a moment, or until it has ended or a signal arrives.
    void wait() {
        const WithoutInterpreter unlocked;
        thread_.wait(kBetweenLooks);
    }
    bool has_ended() const { return thread_.has_ended(); }
    void ask_to_stop() { asked_.set(); }

    // Once it has ended: what it raised, or null; what it returned.
    py::error_already_set* error() const { return error_.get(); }
    py::object take_result() { return std::move(result_); }

  private:
    // Returns whether the thread is left as it was.
    bool perform() noexcept {
        try {
            cuda_.apply();
            thread_role.operation_asked = &asked_;
            const PyGILState_STATE state = PyGILState_Ensure();
            const bool entered = PyContext_Enter(variables_.ptr()) == 0;
            result_ = py::reinterpret_steal<py::object>(entered ? PyObject_CallNoArgs(work_.ptr()) : nullptr);
            if (!result_) keep_error();
            if (entered && PyContext_Exit(variables_.ptr()) != 0) PyErr_Clear();
            PyGILState_Release(state);
            thread_role.operation_asked = nullptr;
            return CudaThreadState::reset();
        } catch (abi::__forced_unwind&) {
            stay_until_the_process_ends();
        }
    }

    void keep_error() noexcept {
        try {
            error_ = raised();
        } catch (const std::exception&) {  // no memory for it: `outcome_of` says so
            PyErr_Clear();
        }
    }

    const py::object& work_;
    const py::object variables_;
    const CudaThreadState cuda_;
    Event asked_;
    OperationThread thread_;
    py::object result_;
    Error error_;
};

// Where no thread can be started: one call on the caller's own thread, which signals disturb no more than on another.
class OperationHere {
  public:
    explicit OperationHere(const py::object& work) {
        HandlersRaiseLater later;
        {
            const Role here(later.asked());
            result_ = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(work.ptr()));
            if (!result_) error_ = raised();
        }
        later.put_back();
        of_signals_ = std::move(later.errors());
    }
    SignalErrors& of_signals() { return of_signals_; }
    py::error_already_set* error() const { return error_.get(); }
    py::object take_result() { return std::move(result_); }

  private:
    struct Role {
        explicit Role(const Event& asked) {
            thread_role.operation_asked = &asked;
            thread_role.is_callers = true;
        }
        ~Role() {
            thread_role.operation_asked = nullptr;
            thread_role.is_callers = false;
        }
    };

    py::object result_;
    Error error_;
    SignalErrors of_signals_;
};

template <class Ended>
PyObject* outcome_of(Ended& operation, SignalErrors& of_signals) {
    if (of_signals) of_signals.raise(operation.error());
    if (operation.error()) throw py::error_already_set(*operation.error());
    py::object result = operation.take_result();
    if (!result) throw std::bad_alloc();
    return result.release().ptr();
}

// Throws what signal handlers raise, which run in the middle of it.
void call_and_report_our_errors(const py::object& work) {
    try {
        work();
    } catch (py::error_already_set& error) {
        if (!error.matches(py::handle(errors()).attr("CumemSleepError"))) throw;
        error.discard_as_unraisable(work);
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
    if (!Operation::is_possible() || held_by_this_thread()) return work().release().ptr();
    Operation operation(work);
    if (!operation.start()) {
        OperationHere here(work);
        return outcome_of(here, here.of_signals());
    }
    SignalErrors of_signals;
    for (; !operation.has_ended(); operation.wait())
        if (of_signals.run_handlers()) operation.ask_to_stop();
    return outcome_of(operation, of_signals);
}

bool call_undisturbed(PyObject* called) {
    const auto work = py::reinterpret_borrow<py::object>(called);
    try {
        if (!Operation::is_possible()) {
            call_and_report_our_errors(work);
            return true;
        }
        Operation operation(work);
        if (operation.start()) {
            while (!operation.has_ended()) operation.wait();
            if (operation.error()) operation.error()->discard_as_unraisable(work);
            return true;
        }
        OperationHere here(work);
        if (here.error()) here.error()->discard_as_unraisable(work);
        if (here.of_signals()) here.of_signals().raise(nullptr);
        return true;
    } catch (py::error_already_set& error) {
        error.restore();
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return false;
}

}  // namespace cumem_sleep
