#include "holds.h"

#include <pybind11/pybind11.h>

#include "interpreter.h"

namespace py = pybind11;

namespace cumem_sleep {

namespace {

// The context variable of the innermost label: a task has a context of its own, copied from that of whoever starts it.
// What is closed there is passed over, so nothing has to be put back, which could only be done in the same context.
PyObject* context_variable() {
    static PyObject* const variable = PyContextVar_New("cumem_sleep_label", nullptr);
    if (!variable) throw py::error_already_set();
    return variable;
}

std::shared_ptr<OpenLabel> of_this_context() {
    PyObject* value = nullptr;
    if (PyContextVar_Get(context_variable(), nullptr, &value) < 0) throw py::error_already_set();
    if (!value) return nullptr;
    return *py::reinterpret_steal<py::capsule>(value).get_pointer<std::shared_ptr<OpenLabel>>();
}

void set_for_this_context(const std::shared_ptr<OpenLabel>& opened) {
    const py::capsule value(new std::shared_ptr<OpenLabel>(opened),
                            [](void* pointer) { delete static_cast<std::shared_ptr<OpenLabel>*>(pointer); });
    const py::object token = py::reinterpret_steal<py::object>(PyContextVar_Set(context_variable(), value.ptr()));
    if (!token) throw py::error_already_set();
}

}  // namespace

void HeldSegments::release() noexcept {
    SegmentTable::get().release(segments_);
    segments_.clear();
}

Allocation::~Allocation() {
    if (!address_) return;
    const WithoutInterpreter unlocked;
    cumem_sleep_free(reinterpret_cast<void*>(address_), 0, 0, nullptr);
}

ScopeOfLabel::ScopeOfLabel(const Label& label) : opened_(open_label(label, of_this_context())) {
    try {
        set_for_this_context(opened_);
    } catch (...) {
        close();  // there is no destructor yet
        throw;
    }
}

void ScopeOfLabel::close() { close_label(*opened_); }

const Label& label_of_this_task() { return label_of_task(of_this_context()); }

}  // namespace cumem_sleep
