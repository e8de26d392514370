#include "free_listener.h"

#include <atomic>

#include "allocator.h"
#include "operation.h"

namespace py = pybind11;

namespace cumem_sleep {

namespace {

// The hooks run without the interpreter. Python's part of a free is deferred to the main thread, where it may run
// between any two steps of the program.
std::atomic<bool> notification_pending{false};
PyObject* on_free_callback = nullptr;

int notify_python(void*) {
    notification_pending = false;
    if (!on_free_callback) return 0;
    try {
        call_undisturbed(py::reinterpret_borrow<py::object>(on_free_callback));
    } catch (py::error_already_set& error) {
        error.restore();  // raised by a signal handler, so it belongs here
        return -1;
    }
    return 0;
}

}  // namespace

void on_free(py::object callback) {
    Py_XDECREF(on_free_callback);
    on_free_callback = callback.is_none() ? nullptr : callback.release().ptr();
    set_free_listener(on_free_callback ? +[] {
        if (!notification_pending.exchange(true) && Py_AddPendingCall(notify_python, nullptr) != 0)
            notification_pending = false;
    } : nullptr);
}

}  // namespace cumem_sleep
