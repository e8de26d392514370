// `SignalErrors`: what signal handlers raised while their thread waited for an operation.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace cumem_sleep {

// At most two are kept: the first, and the first that is not an `Exception`, so that code which catches a TimeoutError
// does not swallow a Ctrl-C with it. Used with the interpreter lock held.
class SignalErrors {
  public:
    // Lets signal handlers run that are pending, on the main thread. Returns whether one raised something.
    bool run_handlers();

    explicit operator bool() const { return first_ != nullptr; }

    // Raises the first one. The other one, and what the operation itself raised (or null), become its context.
    [[noreturn]] void raise(const pybind11::error_already_set* of_operation);

  private:
    std::unique_ptr<pybind11::error_already_set> first_, second_;
    bool is_grave_ = false;
};

}  // namespace cumem_sleep
