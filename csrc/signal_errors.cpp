#include "signal_errors.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "errors.h"
#include "interpreter.h"

namespace py = pybind11;

namespace cumem_sleep {

namespace {

constexpr int kMostTries = 100;

// The module without Python code of its own, in the middle of which handlers would run.
py::module_ signals() { return py::module_::import("_signal"); }

bool contains(const std::vector<py::object>& objects, const py::object& wanted) {
    return std::any_of(objects.begin(), objects.end(), [&](const py::object& each) { return each.is(wanted); });
}

// The error, what it has as context, and so on: each once, because handlers may have made a circle of them.
std::vector<py::object> with_contexts(const py::error_already_set& error) {
    std::vector<py::object> chain;
    py::object next = error.value();
    while (next && !contains(chain, next)) {
        chain.push_back(next);
        next = py::reinterpret_steal<py::object>(PyException_GetContext(next.ptr()));
    }
    return chain;
}

// Does nothing if one of them leads to the other already: that would make a circle, or does.
void add_context(const py::error_already_set& error, const py::error_already_set& context) {
    const std::vector<py::object> mine = with_contexts(error), others = with_contexts(context);
    if (std::any_of(others.begin(), others.end(), [&](const py::object& each) { return contains(mine, each); })) return;
    const py::object& last = mine.back();
    if (py::reinterpret_steal<py::object>(PyException_GetContext(last.ptr()))) return;  // a circle
    PyException_SetContext(last.ptr(), py::object(context.value()).release().ptr());
}

}  // namespace

bool SignalErrors::run_handlers() {
    if (!handlers_raise()) return false;
    note(std::make_unique<py::error_already_set>());
    return true;
}

void SignalErrors::note(std::unique_ptr<py::error_already_set> error) {
    const bool is_grave = !error->matches(PyExc_Exception);
    if (is_grave && !is_grave_)
        second_ = std::exchange(first_, std::move(error));
    else if (!first_)
        first_ = std::move(error);
    is_grave_ |= is_grave;
}

void SignalErrors::raise(const py::error_already_set* of_operation) {
    if (second_) add_context(*first_, *second_);
    if (of_operation && !of_operation->matches(operation_stopped())) add_context(*first_, *of_operation);
    throw py::error_already_set(*first_);
}

void HandlersRaiseLater::Raised::note(const py::error_already_set& error) noexcept {
    asked.set();
    try {
        errors.note(std::make_unique<py::error_already_set>(error));
    } catch (const std::exception&) {  // no memory to keep it
    }
}

HandlersRaiseLater::HandlersRaiseLater() {
    const auto main = py::module_::import("threading").attr("main_thread")().attr("ident");
    if (main.is_none() || main.cast<unsigned long>() != PyThread_get_thread_ident()) return;
    const py::object handler_of = signals().attr("getsignal");
    try {
        for (int number = 1; number < NSIG; ++number)
            if (const py::object handler = handler_of(number); PyCallable_Check(handler.ptr()))
                replace(number, handler);
    } catch (...) {
        put_back();
        throw;
    }
}

void HandlersRaiseLater::replace(int number, const py::object& handler) {
    Replaced replaced{number, handler, {}, {}};
    replaced.mine = py::cpp_function([raised = raised_, handler](const py::args& arguments) {
        try {
            handler(*arguments);
        } catch (py::error_already_set& error) {
            if (raised->is_over) throw;
            raised->note(error);
        }
    });
    sigaction(number, nullptr, &replaced.action);
    replaced_.push_back(replaced);
    signals().attr("signal")(number, replaced.mine);
    sigaction(number, &replaced.action, nullptr);
}

void HandlersRaiseLater::put_back() noexcept {
    while (!replaced_.empty()) {
        const Replaced& last = replaced_.back();
        // Each try first runs pending handlers, some of which are in their places again.
        for (int tries = 0; tries < kMostTries; ++tries) {
            try {
                if (!signals().attr("getsignal")(last.number).is(last.mine)) break;  // or a handler has set another
                signals().attr("signal")(last.number, last.before);
                sigaction(last.number, &last.action, nullptr);
                break;
            } catch (py::error_already_set& error) {
                raised_->note(error);
            }
        }
        replaced_.pop_back();
    }
    raised_->is_over = true;
}

}  // namespace cumem_sleep
