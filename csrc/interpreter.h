// Releases the interpreter lock for a scope.
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
