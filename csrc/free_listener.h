// Tells Python about segments that the free hook freed.
#pragma once

#include <Python.h>

namespace cumem_sleep {

// Calls `callback` on the main thread soon after the free hook freed a segment whose backup or memory is still to be
// released. None removes the callback. Called with the interpreter lock held.
void on_free(PyObject* callback);

}  // namespace cumem_sleep
