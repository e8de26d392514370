#include "thread_role.h"

#include <pybind11/pybind11.h>

#include "errors.h"
#include "threads.h"

namespace py = pybind11;

namespace cumem_sleep {

void stop_if_asked() {
    if (thread_role.operation_asked) {
        if (thread_role.operation_asked->is_set()) throw OperationStopped();
    } else if (!thread_role.worker) {
        py::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

}  // namespace cumem_sleep
