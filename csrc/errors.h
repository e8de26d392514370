// The errors of this layer as Python's.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace cumem_sleep {

// `cumem_sleep.errors`, for as long as the process lives: while Python exits, it can no longer be imported.
pybind11::handle errors();

// The type that OperationStopped is in Python. No `Exception`: see operation.h.
pybind11::handle operation_stopped();

// Raises what `cumem_sleep.errors` has for an error of this layer; any other error it leaves to the next translator.
void translate_error(std::exception_ptr pointer);

}  // namespace cumem_sleep
