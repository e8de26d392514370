#include "holds.h"

#include "errors.h"
#include "interpreter.h"

namespace cumem_sleep {

namespace {

constexpr char kName[] = "cumem_sleep_label";

// The context variable of the innermost label: a task has a context of its own, copied from that of whoever starts it.
// What is closed there is passed over, so nothing has to be put back, which could only be done in the same context.
PyObject* context_variable() {
    static PyObject* const variable = PyContextVar_New(kName, nullptr);
    if (!variable) throw_python_error();
    return variable;
}

// What a value of that variable, a capsule, holds: null, with Python's error, if somebody else has set another value.
std::shared_ptr<OpenLabel>* label_in(PyObject* value) {
    return static_cast<std::shared_ptr<OpenLabel>*>(PyCapsule_GetPointer(value, kName));
}

std::shared_ptr<OpenLabel> of_this_context() {
    PyObject* value = nullptr;
    if (PyContextVar_Get(context_variable(), nullptr, &value) < 0) throw_python_error();
    if (!value) return nullptr;
    const std::shared_ptr<OpenLabel>* const found = label_in(value);
    std::shared_ptr<OpenLabel> opened = found ? *found : nullptr;
    Py_DECREF(value);
    if (!found) throw_python_error();
    return opened;
}

void set_for_this_context(const std::shared_ptr<OpenLabel>& opened) {
    auto held = std::make_unique<std::shared_ptr<OpenLabel>>(opened);
    PyObject* const value = PyCapsule_New(held.get(), kName, [](PyObject* dropped) { delete label_in(dropped); });
    if (!value) throw_python_error();
    held.release();
    PyObject* const token = PyContextVar_Set(context_variable(), value);
    Py_DECREF(value);
    if (!token) throw_python_error();
    Py_DECREF(token);
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
