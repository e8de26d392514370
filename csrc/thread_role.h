// What the calling thread is for, if the layer calls Python on it. It decides where that thread looks for a request to
// stop, and that it starts no further thread to work on.
#pragma once

#include <atomic>

namespace cumem_sleep {

class Worker;

// Between the thread of an operation and its caller.
struct Stopping {
    std::atomic<bool> caller_runs_handlers{false};  // to let signal handlers run, once
    std::atomic<bool> is_asked{false};              // one has raised
};

struct ThreadRole {
    Stopping* stopping = nullptr;    // of an operation
    const Worker* worker = nullptr;  // of a background thread
};

inline thread_local ThreadRole thread_role;

// For whoever waits for others, again and again until that is over. On the thread of an operation: lets its caller run
// signal handlers once, and throws OperationStopped if one has raised. On a Python thread: runs them here, and throws
// what they raise. Called without the interpreter lock.
void stop_if_asked();

}  // namespace cumem_sleep
