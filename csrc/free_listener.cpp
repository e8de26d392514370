#include "free_listener.h"

#include <atomic>
#include <utility>

#include "allocator.h"
#include "operation_lock.h"

namespace cumem_sleep {

namespace {

// The hooks run without the interpreter. Python's part of a free is deferred to the main thread, where it may run
// between any two steps of the program.
std::atomic<bool> notification_pending{false};
PyObject* on_free_callback = nullptr;

int notify_python(void*) {
    notification_pending = false;
    return !on_free_callback || run_callback(on_free_callback) ? 0 : -1;
}

}  // namespace

void on_free(PyObject* callback) {
    if (callback == Py_None) callback = nullptr;
    Py_XINCREF(callback);
    Py_XDECREF(std::exchange(on_free_callback, callback));
    set_free_listener(on_free_callback ? +[] {
        if (!notification_pending.exchange(true) && Py_AddPendingCall(notify_python, nullptr) != 0)
            notification_pending = false;
    } : nullptr);
}

}  // namespace cumem_sleep
