#include "worker.h"

#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <utility>

#include "driver.h"
#include "interpreter.h"
#include "thread_role.h"

namespace cumem_sleep {

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

}  // namespace

Worker::Worker(std::string name) : name_(std::move(name)), process_(getpid()) {}

void Worker::start(PyObject* work) {
    if (started_.exchange(true)) throw InvalidState("the thread " + name_ + " was already started");
    try {
        if (is_finalizing()) throw std::runtime_error("Python exits");
        auto self = shared_from_this();
        Py_INCREF(work);
        try {
            start_thread(name_, [self, work] { self->perform(work); }).detach();
        } catch (...) {
            Py_DECREF(work);
            throw;
        }
    } catch (const std::exception& error) {
        ended_.set();
        throw InvalidState(std::string("no thread can be started: ") + error.what());
    }
}

void Worker::perform(PyObject* work) noexcept {
    try {
        thread_role.worker = this;
        const PyGILState_STATE state = PyGILState_Ensure();
        PyObject* result = PyObject_CallNoArgs(work);
        if (!result) PyErr_WriteUnraisable(work);
        Py_XDECREF(result);
        Py_DECREF(work);
        PyGILState_Release(state);
        ended_.set();
    } catch (abi::__forced_unwind&) {
        stay_until_the_process_ends();
    }
}

bool Worker::running() const noexcept { return started_ && !ended_.is_set() && process_ == getpid(); }

bool Worker::pause(double seconds) const {
    const WithoutInterpreter unlocked;
    const auto end = Clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(Seconds(seconds));
    for (;;) {
        const std::chrono::nanoseconds left = end - Clock::now();
        if (asked_.wait(left)) return true;
        if (Clock::now() >= end) return false;
    }
}

bool Worker::wait(std::optional<double> timeout_s) const {
    const Seconds at_most(timeout_s.value_or(0));
    const Clock::time_point begin = Clock::now();
    while (running() && !is_finalizing()) {
        std::chrono::nanoseconds turn = kBetweenLooks;
        if (timeout_s) {
            const Seconds left = at_most - (Clock::now() - begin);
            if (left <= left.zero()) break;
            if (left < turn) turn = std::chrono::duration_cast<std::chrono::nanoseconds>(left);
        }
        const WithoutInterpreter unlocked;
        if (!ended_.wait(turn)) stop_if_asked();
    }
    return !running();
}

void Worker::stop() {
    ask_to_stop();
    if (thread_role.worker != this) wait(std::nullopt);
}

}  // namespace cumem_sleep
