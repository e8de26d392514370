#include "thread_role.h"

#include "errors.h"
#include "interpreter.h"
#include "threads.h"

namespace cumem_sleep {

void stop_if_asked() {
    if (thread_role.worker) return;
    if (!thread_role.operation_asked || thread_role.is_callers) {
        const WithInterpreter interpreter;
        if (handlers_raise()) throw_python_error();
    }
    if (thread_role.operation_asked && thread_role.operation_asked->is_set()) throw OperationStopped();
}

}  // namespace cumem_sleep
