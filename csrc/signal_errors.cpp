#include "signal_errors.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "errors.h"

namespace py = pybind11;

namespace cumem_sleep {

namespace {

bool contains(const std::vector<py::object>& objects, const py::object& wanted) {
    return std::any_of(objects.begin(), objects.end(), [&](const py::object& each) { return each.is(wanted); });
}

// The error, what it has as context, and so on: each once, because handlers may have made a circle of them.
std::vector<py::object> with_contexts(const py::error_already_set& error) {
    std::vector<py::object> chain;
    py::object next = error.value();
    while (next && !contains(chain, next)) {
        chain.push_back(next);
        next = py::reinterpret_steal<py::object>(PyException_GetContext(next.ptr()));
    }
    return chain;
}

// Does nothing if one of them leads to the other already: that would make a circle, or does.
void add_context(const py::error_already_set& error, const py::error_already_set& context) {
    const std::vector<py::object> mine = with_contexts(error), others = with_contexts(context);
    if (std::any_of(others.begin(), others.end(), [&](const py::object& each) { return contains(mine, each); })) return;
    const py::object& last = mine.back();
    if (py::reinterpret_steal<py::object>(PyException_GetContext(last.ptr()))) return;  // a circle
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
