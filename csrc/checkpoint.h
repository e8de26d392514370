// CUDA's process checkpoint: one process stops another one's use of the GPU, takes its memory off it, and gives it
// back.
//
// RUNNING -lock-> LOCKED -checkpoint-> CHECKPOINTED -restore-> LOCKED -unlock-> RUNNING. The other process is named by
// its id. The calls need an open driver in this process, but no context, and create none. All throw DriverError: in the
// wrong state CUDA_ERROR_ILLEGAL_STATE, with a driver older than 570 CUDA_ERROR_NOT_SUPPORTED.
#pragma once

#include "driver.h"

namespace cumem_sleep {

enum class ProcessState {
    kRunning = CU_PROCESS_STATE_RUNNING,
    kLocked = CU_PROCESS_STATE_LOCKED,
    kCheckpointed = CU_PROCESS_STATE_CHECKPOINTED,
    kFailed = CU_PROCESS_STATE_FAILED,
};

// Whether the open driver is new enough and has these calls.
bool can_checkpoint();

ProcessState process_state(int pid);

// Blocks the process's further driver calls. CUDA_ERROR_NOT_READY after `timeout_s`, in which case it still runs.
// Throws std::invalid_argument unless 0 < timeout_s, because CUDA would take 0 for no timeout.
void lock_process(int pid, double timeout_s);

void checkpoint_process(int pid);
void restore_process(int pid);
void unlock_process(int pid);

}  // namespace cumem_sleep
