// Python's interpreter lock: taking or releasing it for a scope, and what becomes of threads without it while Python
// exits.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace cumem_sleep {

// While Python exits, it ends daemon threads that ask for the lock by unwinding their stacks. pybind11's frames would
// then drop references without the lock and crash the process. So such a thread stops here, as newer Pythons do it, and
// ends with the process; it holds no lock of ours.
[[noreturn]] inline void stay_until_the_process_ends() {
    for (;;) pause();
}

// While Python exits, no other thread gets the interpreter any more, so nobody may wait for one.
inline bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

// Runs pending signal handlers, and, from Python 3.12 on, finalisers, in which a daemon thread may be ended, too.
inline bool handlers_raise() {
    try {
        return PyErr_CheckSignals() != 0;
    } catch (abi::__forced_unwind&) {
        stay_until_the_process_ends();
    }
}

class WithInterpreter {
  public:
    WithInterpreter() {
        try {
            state_ = PyGILState_Ensure();
        } catch (abi::__forced_unwind&) {
            stay_until_the_process_ends();
        }
    }
    ~WithInterpreter() { PyGILState_Release(state_); }
    WithInterpreter(const WithInterpreter&) = delete;
    WithInterpreter& operator=(const WithInterpreter&) = delete;

  private:
    PyGILState_STATE state_;
};

class WithoutInterpreter {
  public:
    WithoutInterpreter() : state_(PyEval_SaveThread()) {}
    ~WithoutInterpreter() {
        try {
            PyEval_RestoreThread(state_);
        } catch (abi::__forced_unwind&) {
            stay_until_the_process_ends();
        }
    }
    WithoutInterpreter(const WithoutInterpreter&) = delete;
    WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

  private:
    PyThreadState* state_;
};

}  // namespace cumem_sleep
