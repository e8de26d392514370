// Translates the errors of this layer into Python exceptions.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace cumem_sleep {

// The module `cumem_sleep.errors`, kept for as long as the process lives: it cannot be imported while Python exits.
pybind11::handle errors();

// The Python type of OperationStopped. It does not derive from `Exception`: see operation.h.
pybind11::handle operation_stopped();

// Raises the `cumem_sleep.errors` type for an error of this layer; leaves any other error to the next translator.
void translate_error(std::exception_ptr pointer);

}  // namespace cumem_sleep
