// What the calling thread is for, if the layer calls Python on it. It decides where that thread looks for a request to
// stop, and that it starts no further thread to work on.
#pragma once

namespace cumem_sleep {

class Event;
class Worker;

struct ThreadRole {
    const Event* operation_asked = nullptr;  // of an operation: set when that is to stop
    bool is_callers = false;                 // the operation runs on the thread of its caller
    const Worker* worker = nullptr;          // of a background thread
};

inline thread_local ThreadRole thread_role;

// On the thread of an operation: throws OperationStopped if it was asked to stop. On a Python thread: runs pending
// signal handlers, and throws what they raise unless the thread runs an operation. Called without the interpreter lock.
void stop_if_asked();

}  // namespace cumem_sleep
