#include "thread_role.h"

#include "errors.h"
#include "interpreter.h"

namespace cumem_sleep {

void stop_if_asked() {
    if (thread_role.worker) return;
    if (Stopping* const stopping = thread_role.stopping) {
        if (stopping->is_asked) throw OperationStopped();
        stopping->caller_runs_handlers = true;
        return;
    }
    const WithInterpreter interpreter;
    if (handlers_raise()) throw_python_error();
}

}  // namespace cumem_sleep
