// What signal handlers raise while their thread waits for an operation (`SignalErrors`), or runs one itself
// (`HandlersRaiseLater`).
#pragma once

#include <pybind11/pybind11.h>

#include <csignal>
#include <memory>
#include <vector>

#include "threads.h"

namespace cumem_sleep {

// At most two are kept: the first, and the first that is not an `Exception`, so that code which catches a TimeoutError
// does not swallow a Ctrl-C with it. Used with the interpreter lock held.
class SignalErrors {
  public:
    // Lets signal handlers run that are pending, on the main thread. Returns whether one raised something.
    bool run_handlers();

    void note(std::unique_ptr<pybind11::error_already_set> error);

    explicit operator bool() const { return first_ != nullptr; }

    // Raises the first one. The other one, and what the operation itself raised (or null), become its context.
    [[noreturn]] void raise(const pybind11::error_already_set* of_operation);

  private:
    std::unique_ptr<pybind11::error_already_set> first_, second_;
    bool is_grave_ = false;
};

// While it lives, signal handlers run as they come on the thread that made it, and what they raise is noted for the end
// of the operation there, and asks it to stop. It does nothing on any thread but the main one: no handler runs there.
class HandlersRaiseLater {
  public:
    struct Raised {
        void note(const pybind11::error_already_set& error) noexcept;

        SignalErrors errors;
        Event asked;
        bool is_over = false;
    };

    // Throws what pending handlers raise before it is made.
    HandlersRaiseLater();
    ~HandlersRaiseLater() { put_back(); }
    HandlersRaiseLater(const HandlersRaiseLater&) = delete;
    HandlersRaiseLater& operator=(const HandlersRaiseLater&) = delete;

    // The handlers are as before. What pending ones raise meanwhile is noted as well.
    void put_back() noexcept;
    SignalErrors& errors() { return raised_->errors; }
    const Event& asked() const { return raised_->asked; }

  private:
    struct Replaced {
        int number;
        pybind11::object before, mine;
        struct sigaction action;  // which also says what system calls do that it interrupts
    };

    void replace(int number, const pybind11::object& handler);

    // Shared with the handlers: somebody may keep one of them as the one before his own.
    std::shared_ptr<Raised> raised_ = std::make_shared<Raised>();
    std::vector<Replaced> replaced_;
};

}  // namespace cumem_sleep
