#include "thread_role.h"

#include <pybind11/pybind11.h>

#include "errors.h"
#include "threads.h"

namespace py = pybind11;

namespace cumem_sleep {

void stop_if_asked() {
    if (thread_role.worker) return;
    if (!thread_role.operation_asked || thread_role.is_callers) {
        py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
    if (thread_role.operation_asked && thread_role.operation_asked->is_set()) throw OperationStopped();
}

}  // namespace cumem_sleep
