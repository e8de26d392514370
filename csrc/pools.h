// Pools: what an allocation is given. PyTorch routes the allocations of a whole thread to the pool that was entered
// last, and its hooks run without the interpreter lock; so a pool counts for its thread. Asyncio tasks of one thread
// cannot be told apart: one may not enter a pool while another is in one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace cumem_sleep {

// What decides about the bytes at a sleep. With a plan of its own, memory sleeps by its tag only, at no level.
enum class BackupPlan {
    kByLevel,  // the level, or the tags of the call
    kAlways,   // they are kept
    kNever,    // they are dropped
};

// What an allocation is given, and keeps.
struct Pool {
    std::string tag = "default";
    BackupPlan backup = BackupPlan::kByLevel;
};

// A pool that the calling thread is in until `leave`. Pools are left in any order and on any thread: a generator is
// closed by whoever frees it. So none puts back what was there before. Entered and left with the interpreter lock held.
class PoolScope {
  public:
    // `task`: which asyncio task enters it; 0: none. Throws InvalidState if another one of this thread is in a pool.
    PoolScope(Pool pool, uintptr_t task);
    ~PoolScope() { leave(); }
    PoolScope(const PoolScope&) = delete;
    PoolScope& operator=(const PoolScope&) = delete;

    void leave();

    struct Entered {
        const Pool pool;
        const uintptr_t task;
        std::atomic<bool> open{true};
    };

  private:
    const std::shared_ptr<Entered> entered_;
};

// The innermost pool that the calling thread is in, or the process's. Without the interpreter lock.
const Pool& pool_of_thread();

// The pool of threads that have entered none; called "default" until set. The driver at `driver_path` is opened when
// the preload hook asks for the first time, so that this touches no GPU.
void set_process_pool(const Pool& pool, const std::string& driver_path);
inline std::atomic<const std::string*> driver_to_open{nullptr};  // null again once it could not be opened

}  // namespace cumem_sleep
