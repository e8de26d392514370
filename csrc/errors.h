// Translates the errors of this layer into Python exceptions.
#pragma once

#include <Python.h>

#include <exception>

namespace cumem_sleep {

// The module `cumem_sleep.errors`, kept for as long as the process lives: it cannot be imported while Python exits.
PyObject* errors();

// The operation was asked to stop (operation_lock.h). In Python it does not derive from `Exception`, so that no
// `except Exception` around a step takes it for a failure of that step.
class OperationStopped : public std::exception {
  public:
    const char* what() const noexcept override { return "the operation was asked to stop"; }
};

// Its Python type.
PyObject* operation_stopped();

// Throws what Python has just raised, as pybind11 does. Files that need no more of pybind11 leave its headers out,
// which take the compiler nine seconds. Called with the interpreter lock held.
[[noreturn]] void throw_python_error();

// Raises the `cumem_sleep.errors` type for an error of this layer; leaves any other error to the next translator.
void translate_error(std::exception_ptr pointer);

}  // namespace cumem_sleep
