// What processes know of each other: whether this one may make driver calls, and what memory it uses.
//
// CUDA's checkpoint calls are made by one process on another. So each process has a board, a memfd that the other finds
// under /proc/<pid>/fd and maps; it goes away with its process. Calls pass a gate on the board: two atomic additions
// for a call that is let through. A forked child has no board.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "simulation.h"

namespace cumem_sim {

// What a checkpointed process still uses on each device that it has a context on (measured on an H200: 4 MiB).
constexpr std::uint64_t kCheckpointedBytes = std::uint64_t{4} << 20;

constexpr std::chrono::microseconds kPollInterval{200};

struct Board {
    struct PerDevice {
        std::atomic<std::int32_t> number;  // in the host
        std::atomic<bool> has_context;
        std::atomic<std::uint64_t> used_bytes;  // if its memory is not checkpointed
    };

    std::atomic<std::uint64_t> layout;  // written last: a board without it is not finished
    std::atomic<std::int32_t> pid;      // a child that shares its parent's descriptors is another process
    std::atomic<std::uint32_t> state;   // CUprocessState
    // Odd while calls have to wait. Every closing has a number of its own.
    std::atomic<std::uint32_t> gate;
    std::atomic<std::int64_t> in_progress;  // calls, and work on streams
    std::atomic<bool> checkpointed;         // its memory is not on the devices
    std::atomic<bool> lost;                 // a restore had too little memory: no other one succeeds
    std::atomic<std::uint64_t> device_bytes;
    std::atomic<std::int32_t> devices;  // that are visible
    PerDevice device[kMaxDevices];

    CUprocessState process_state() const { return static_cast<CUprocessState>(state.load()); }
    bool closed() const { return gate % 2 == 1; }
    void close() { gate = (gate | 1) + 2; }
    void open() { gate = (gate | 1) + 1; }
    std::uint64_t used_bytes(int ordinal) const;
};

// At the first cuInit. Throws Refused.
void make_board(Simulation& sim);
// In a forked child.
void leave_board();

void publish(const Settings& settings);
void publish(const Device& device);
void work_enqueued();
void work_ended();

// In existence while a call is in progress; if it `waits`, holds it up while this process is locked.
class Passage {
  public:
    explicit Passage(bool waits);
    ~Passage();
    Passage(const Passage&) = delete;
    Passage& operator=(const Passage&) = delete;

  private:
    bool counted_ = false;
};

// How many calls of this process had to wait.
std::atomic<std::uint64_t>& blocked_calls();

// The board of a process, by its id. Throws Refused: CUDA_ERROR_INVALID_VALUE if there is no such process,
// CUDA_ERROR_NOT_INITIALIZED if it does not use this driver, CUDA_ERROR_NOT_PERMITTED if it is somebody else's.
class FoundBoard {
  public:
    using Clock = std::chrono::steady_clock;

    explicit FoundBoard(int pid);
    ~FoundBoard();
    FoundBoard(const FoundBoard&) = delete;
    FoundBoard& operator=(const FoundBoard&) = delete;

    Board* operator->() const { return board_; }

    // Keeps other processes from changing the board, until this object or this process ends. Throws Refused:
    // CUDA_ERROR_NOT_READY at the deadline, CUDA_ERROR_INVALID_VALUE when the process has died.
    void claim(Clock::time_point deadline);

    // Waits for a condition, otherwise like `claim`.
    template <typename Ready>
    void wait(Clock::time_point deadline, Ready ready) const {
        while (!ready()) {
            require(process_lives(), CUDA_ERROR_INVALID_VALUE);
            require(Clock::now() < deadline, CUDA_ERROR_NOT_READY);
            std::this_thread::sleep_for(kPollInterval);
        }
    }

  private:
    bool process_lives() const;

    int pid_;
    int fd_ = -1;
    Board* board_ = nullptr;
};

}  // namespace cumem_sim
