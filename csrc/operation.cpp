#include "operation.h"

#include <unistd.h>

#include <system_error>
#include <utility>
#include <vector>

#include "driver.h"
#include "errors.h"
#include "interpreter.h"

namespace py = pybind11;

namespace cumem_sleep {

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// What this thread is for, if it is one of ours.
struct Role {
    const Event* operation_asked = nullptr;
    const Worker* worker = nullptr;
};
thread_local Role role;

// While Python exits, no other thread gets the interpreter any more, so nobody may wait for one.
bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

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

// One call on its own thread, which gets the caller's context variables and CUDA's per-thread state.
struct Operation {
    explicit Operation(const py::object& called)
        : work(called), variables(py::reinterpret_steal<py::object>(PyContext_CopyCurrent())) {
        if (!variables) throw py::error_already_set();
    }

    const py::object& work;
    const py::object variables;
    const CudaThreadState cuda;
    Event asked, ended;
    py::object result;
    Error error;

    py::object take_result() {
        if (error) throw py::error_already_set(*error);
        return std::move(result);
    }

    // OperationStopped loses its traceback here. Otherwise the caller's thread would clear the traceback's frames and
    // close their generators; a signal handler could run in the middle of that, and its exception would be lost.
    void take_error() {
        error = std::make_unique<py::error_already_set>();
        if (error->matches(operation_stopped())) error = stopped();
    }
    static Error stopped() {
        PyErr_SetNone(operation_stopped().ptr());
        return std::make_unique<py::error_already_set>();
    }

    void perform() noexcept {
        try {
            cuda.apply();
            role.operation_asked = &asked;
            const PyGILState_STATE state = PyGILState_Ensure();
            const bool entered = PyContext_Enter(variables.ptr()) == 0;
            result = py::reinterpret_steal<py::object>(entered ? PyObject_CallNoArgs(work.ptr()) : nullptr);
            if (!result) take_error();
            if (entered && PyContext_Exit(variables.ptr()) != 0) PyErr_Clear();
            PyGILState_Release(state);
            ended.set();
        } catch (abi::__forced_unwind&) {
            stay_until_the_process_ends();
        }
    }
};

// What signal handlers raised while an operation ran. At most two are kept: the first, and the first that is no
// `Exception`, so that code which catches a TimeoutError does not swallow a Ctrl-C with it.
class Raised {
  public:
    void take() {
        auto error = std::make_unique<py::error_already_set>();
        const bool is_grave = !error->matches(PyExc_Exception);
        if (is_grave && !is_grave_)
            second_ = std::exchange(first_, std::move(error));
        else if (!first_)
            first_ = std::move(error);
        is_grave_ |= is_grave;
    }
    explicit operator bool() const { return first_ != nullptr; }
    // Raises the first one; the other one and the operation's own error become its context.
    [[noreturn]] void raise(const Error& of_operation) {
        if (second_) add_context(*first_, *second_);
        if (of_operation && !of_operation->matches(operation_stopped())) add_context(*first_, *of_operation);
        throw py::error_already_set(*first_);
    }

  private:
    static void add_context(const py::error_already_set& error, const py::error_already_set& context) {
        py::object last = error.value();
        for (;;) {
            if (last.is(context.value())) return;
            PyObject* next = PyException_GetContext(last.ptr());
            if (!next) break;
            last = py::reinterpret_steal<py::object>(next);
        }
        PyException_SetContext(last.ptr(), py::object(context.value()).release().ptr());
    }

    Error first_, second_;
    bool is_grave_ = false;
};

bool may_start_thread() { return !role.operation_asked && !role.worker && !is_finalizing(); }

// Runs `operation` to its end on a new thread; false if no thread can be started. Called with the interpreter lock
// held.
bool perform_aside(Operation& operation, Raised* raised) {
    std::thread thread;
    {
        const WithoutInterpreter unlocked;
        try {
            thread = start_thread("cumem-operation", [&operation] { operation.perform(); });
        } catch (const std::exception&) {
            return false;
        }
    }
    for (;;) {
        {
            const WithoutInterpreter unlocked;
            if (operation.ended.wait(kBetweenLooks)) {
                thread.join();
                return true;
            }
        }
        if (raised && PyErr_CheckSignals() != 0) {
            raised->take();
            operation.asked.set();
        }
    }
}

}  // namespace

void stop_if_asked() {
    if (role.operation_asked) {
        if (role.operation_asked->is_set()) throw OperationStopped();
    } else if (!role.worker) {
        py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

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
        if (role.worker && role.worker->asked_to_stop())
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

py::object OperationLock::run(const py::object& work) {
    if (!may_start_thread() || held_by_this_thread()) return work();
    Operation operation(work);
    Raised raised;
    if (!perform_aside(operation, &raised)) return work();
    if (raised) raised.raise(operation.error);
    return operation.take_result();
}

void call_undisturbed(const py::object& work) {
    Operation operation(work);
    if (may_start_thread() && perform_aside(operation, nullptr)) {
        if (operation.error) operation.error->discard_as_unraisable(work);
        return;
    }
    try {
        work();
    } catch (py::error_already_set& error) {
        if (!error.matches(errors().attr("CumemSleepError"))) throw;
        error.discard_as_unraisable(work);
    }
}

Worker::Worker(std::string name) : name_(std::move(name)), process_(getpid()) {}

void Worker::start(const py::object& work) {
    if (started_.exchange(true)) throw InvalidState("the thread " + name_ + " was already started");
    try {
        if (is_finalizing()) throw std::runtime_error("Python exits");
        PyObject* const called = work.ptr();
        auto self = shared_from_this();
        Py_INCREF(called);
        try {
            start_thread(name_, [self, called] { self->perform(called); }).detach();
        } catch (...) {
            Py_DECREF(called);
            throw;
        }
    } catch (const std::exception& error) {
        ended_.set();
        throw InvalidState(std::string("no thread can be started: ") + error.what());
    }
}

void Worker::perform(PyObject* work) noexcept {
    try {
        role.worker = this;
        const PyGILState_STATE state = PyGILState_Ensure();
        PyObject* result = PyObject_CallNoArgs(work);
        if (!result) PyErr_WriteUnraisable(work);
        Py_XDECREF(result);
        Py_DECREF(work);
        PyGILState_Release(state);
        ended_.set();
    } catch (abi::__forced_unwind&) {
        stay_until_the_process_ends();
    }
}

bool Worker::running() const noexcept { return started_ && !ended_.is_set() && process_ == getpid(); }

bool Worker::is_this_thread() const noexcept { return role.worker == this; }

bool Worker::pause(double seconds) const {
    const WithoutInterpreter unlocked;
    const auto end = Clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(seconds));
    for (;;) {
        const std::chrono::nanoseconds left = end - Clock::now();
        if (asked_.wait(left)) return true;
        if (Clock::now() >= end) return false;
    }
}

bool Worker::wait(std::optional<double> timeout_s) const {
    const Seconds at_most(timeout_s.value_or(0));
    const Clock::time_point begin = Clock::now();
    while (running() && !is_finalizing()) {
        std::chrono::nanoseconds turn = kBetweenLooks;
        if (timeout_s) {
            const Seconds left = at_most - (Clock::now() - begin);
            if (left <= left.zero()) break;
            if (left < turn) turn = std::chrono::duration_cast<std::chrono::nanoseconds>(left);
        }
        const WithoutInterpreter unlocked;
        if (!ended_.wait(turn)) stop_if_asked();
    }
    return !running();
}

void Worker::stop() {
    ask_to_stop();
    if (!is_this_thread()) wait(std::nullopt);
}

}  // namespace cumem_sleep
