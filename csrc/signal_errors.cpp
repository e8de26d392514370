#include "signal_errors.h"

#include <utility>

#include "errors.h"

namespace py = pybind11;

namespace cumem_sleep {

namespace {

void add_context(const py::error_already_set& error, const py::error_already_set& context) {
    py::object last = error.value();
    for (;;) {
        if (last.is(context.value())) return;
        PyObject* next = PyException_GetContext(last.ptr());
        if (!next) break;
        last = py::reinterpret_steal<py::object>(next);
    }
    PyException_SetContext(last.ptr(), py::object(context.value()).release().ptr());
}

}  // namespace

bool SignalErrors::run_handlers() {
    if (PyErr_CheckSignals() == 0) return false;
    auto error = std::make_unique<py::error_already_set>();
    const bool is_grave = !error->matches(PyExc_Exception);
    if (is_grave && !is_grave_)
        second_ = std::exchange(first_, std::move(error));
    else if (!first_)
        first_ = std::move(error);
    is_grave_ |= is_grave;
    return true;
}

void SignalErrors::raise(const py::error_already_set* of_operation) {
    if (second_) add_context(*first_, *second_);
    if (of_operation && !of_operation->matches(operation_stopped())) add_context(*first_, *of_operation);
    throw py::error_already_set(*first_);
}

}  // namespace cumem_sleep
