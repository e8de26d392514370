// Process checkpoints: one process stops the driver calls of another and takes its memory off the devices.
//
// The memory's bytes stay where they are, in the other process's memfds; only the account of them changes. cuda.h says
// that a lock blocks further calls, and only a lock has a timeout. So it is the lock that waits for calls in progress
// and for enqueued work here, host functions included, and a checkpoint finds none.
//
// After a restore fails for want of memory, every later one fails too, as on an H200
// (`checkpoint_behaviour.json`, driver 580).
//
// CUDA_ERROR_UNKNOWN, injected into Checkpoint or Restore, leaves the process in CU_PROCESS_STATE_FAILED: it never gets
// past its next driver call. Every other injected error leaves the state as it is.
#include <algorithm>
#include <cstring>

#include "control.h"
#include "devices.h"
#include "driver_call.h"
#include "process_board.h"

using namespace cumem_sim;

namespace {

constexpr int kSinceVersion = 12080;
constexpr auto kNoDeadline = FoundBoard::Clock::time_point::max();

template <typename Body>
CUresult checkpoint_call(const char* name, Body body) {
    return driver_call(name, Needs::kInitThoughLocked, [&](Call& call) {
        require(call.sim.settings.driver_version >= kSinceVersion, CUDA_ERROR_NOT_SUPPORTED);
        const Unlocked unlocked(call.lock);  // it may wait, and concerns another process
        body();
        return CUDA_SUCCESS;
    });
}

// Whatever the headers call the fields: what is reserved, and the remapping of devices, must be zero.
template <typename Arguments>
void require_zero(const Arguments* arguments, std::size_t from = 0) {
    if (!arguments) return;
    unsigned char bytes[sizeof(Arguments)];
    std::memcpy(bytes, arguments, sizeof bytes);
    const bool zero = std::all_of(bytes + from, bytes + sizeof bytes, [](unsigned char byte) { return byte == 0; });
    require(zero, CUDA_ERROR_INVALID_VALUE);
}

// Claims the board of a process in state `from`; `change` is made if it is still in that state then.
template <typename Change>
void change_state(int pid, CUprocessState from, FoundBoard::Clock::time_point deadline, Change change) {
    FoundBoard board(pid);
    require(board->process_state() == from, CUDA_ERROR_ILLEGAL_STATE);
    board.claim(deadline);
    require(board->process_state() == from, CUDA_ERROR_ILLEGAL_STATE);
    change(board);
}

CUresult fail_if_unknown(CUresult result, int pid, CUprocessState from) {
    if (result != CUDA_ERROR_UNKNOWN) return result;
    try {
        change_state(pid, from, kNoDeadline, [](FoundBoard& board) { board->state = CU_PROCESS_STATE_FAILED; });
    } catch (const Refused&) {
        // It was in no state to fail in.
    }
    return result;
}

bool has_room(const FoundBoard& board) {
    const auto* const devices = board->device;
    return std::all_of(devices, devices + board->devices,
                       [&](const auto& device) { return device.used_bytes <= board->device_bytes; });
}

}  // namespace

CUresult CUDAAPI cuCheckpointProcessGetState(int pid, CUprocessState* state) {
    return checkpoint_call("cuCheckpointProcessGetState", [&] {
        require(state, CUDA_ERROR_INVALID_VALUE);
        *state = FoundBoard(pid)->process_state();
    });
}

CUresult CUDAAPI cuCheckpointProcessLock(int pid, CUcheckpointLockArgs* args) {
    return checkpoint_call("cuCheckpointProcessLock", [&] {
        require_zero(args, sizeof args->timeoutMs);
        const unsigned int timeout_ms = args ? args->timeoutMs : 0;
        const auto deadline =
            timeout_ms ? FoundBoard::Clock::now() + std::chrono::milliseconds(timeout_ms) : kNoDeadline;
        change_state(pid, CU_PROCESS_STATE_RUNNING, deadline, [&](FoundBoard& board) {
            board->close();
            try {
                board.wait(deadline, [&] { return board->in_progress == 0; });
            } catch (const Refused&) {
                board->open();  // the process would too, with its next call
                throw;
            }
            board->state = CU_PROCESS_STATE_LOCKED;
        });
    });
}

CUresult CUDAAPI cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs* args) {
    const CUresult result = checkpoint_call("cuCheckpointProcessCheckpoint", [&] {
        require_zero(args);
        change_state(pid, CU_PROCESS_STATE_LOCKED, kNoDeadline, [](FoundBoard& board) {
            board->checkpointed = true;
            board->state = CU_PROCESS_STATE_CHECKPOINTED;
        });
    });
    return fail_if_unknown(result, pid, CU_PROCESS_STATE_LOCKED);
}

CUresult CUDAAPI cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs* args) {
    const CUresult result = checkpoint_call("cuCheckpointProcessRestore", [&] {
        require_zero(args);
        change_state(pid, CU_PROCESS_STATE_CHECKPOINTED, kNoDeadline, [](FoundBoard& board) {
            require(!board->lost, CUDA_ERROR_OPERATING_SYSTEM);
            board->lost = !has_room(board);
            require(!board->lost, CUDA_ERROR_OUT_OF_MEMORY);
            board->checkpointed = false;
            board->state = CU_PROCESS_STATE_LOCKED;
        });
    });
    return fail_if_unknown(result, pid, CU_PROCESS_STATE_CHECKPOINTED);
}

CUresult CUDAAPI cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs* args) {
    return checkpoint_call("cuCheckpointProcessUnlock", [&] {
        require_zero(args);
        change_state(pid, CU_PROCESS_STATE_LOCKED, kNoDeadline, [](FoundBoard& board) {
            board->state = CU_PROCESS_STATE_RUNNING;
            board->open();
        });
    });
}

int cumemSimProcessMemory(int pid, const unsigned char* uuid, std::uint64_t* used_bytes, std::uint64_t* total_bytes) {
    if (!uuid || !used_bytes || !total_bytes) return CUDA_ERROR_INVALID_VALUE;
    try {
        const FoundBoard board(pid);
        for (int ordinal = 0; ordinal < board->devices; ++ordinal) {
            const CUuuid candidate = uuid_of(board->device[ordinal].number);
            if (std::memcmp(candidate.bytes, uuid, sizeof candidate.bytes) != 0) continue;
            *used_bytes = board->used_bytes(ordinal);
            *total_bytes = board->device_bytes;
            return CUDA_SUCCESS;
        }
        return CUDA_ERROR_INVALID_DEVICE;
    } catch (const Refused& refused) {
        return refused.result;
    }
}
