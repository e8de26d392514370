#include "errors.h"

#include <pybind11/pybind11.h>

#include "driver.h"
#include "host_memory.h"

namespace py = pybind11;

namespace cumem_sleep {

namespace {

void raise(const char* type, const py::tuple& arguments) {
    const py::object error_type = py::handle(errors()).attr(type);
    PyErr_SetObject(error_type.ptr(), error_type(*arguments).ptr());
}

}  // namespace

PyObject* errors() {
    static PyObject* const module = py::module_::import("cumem_sleep.errors").release().ptr();
    return module;
}

PyObject* operation_stopped() {
    static PyObject* const type = PyErr_NewExceptionWithDoc(
        "cumem_sleep._core.OperationStopped",
        "The operation on this thread was asked to stop: by a signal handler that raised on its caller's thread.",
        PyExc_BaseException, nullptr);
    return type;
}

void throw_python_error() { throw py::error_already_set(); }

void translate_error(std::exception_ptr pointer) {
    try {
        std::rethrow_exception(pointer);
    } catch (const OutOfDeviceMemory& error) {
        raise("OutOfDeviceMemory",
              py::make_tuple(error.needed_bytes, error.free_bytes, error.device, error.call, error.segment));
    } catch (const DriverError& error) {
        raise("DriverError", py::make_tuple(error.call, error.error, error.detail, error.segment));
    } catch (const HostMemoryError& error) {
        raise("OutOfHostMemory", py::make_tuple(error.bytes, 0, error.call, error.what()));
    } catch (const InvalidState& error) {
        raise("InvalidState", py::make_tuple(error.what()));
    } catch (const OperationStopped&) {
        PyErr_SetNone(operation_stopped());
    }
}

}  // namespace cumem_sleep
