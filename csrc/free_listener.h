// Tells Python of segments that the free hook gave back.
#pragma once

#include <pybind11/pybind11.h>

namespace cumem_sleep {

// Calls `callback` on the main thread, soon, after the free hook gave back a segment that leaves more to be given back.
// None stops that. Called with the interpreter lock.
void on_free(pybind11::object callback);

}  // namespace cumem_sleep
