#include "pools.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "driver.h"

namespace cumem_sleep {

namespace {

constexpr char kWhy[] =
    "': PyTorch allocates for a thread and cannot tell tasks apart. Let no task wait in a pool, or give each task a "
    "thread of its own (asyncio.to_thread)";

// Never destroyed: a thread may allocate while the process exits.
std::atomic<const Pool*> process_pool{new Pool};

// In the order in which they were entered; other threads may have left some. A plain pointer, null if there are none:
// a thread may still allocate after its thread_local objects are destroyed.
thread_local std::vector<std::shared_ptr<PoolScope::Entered>>* entered_here = nullptr;

void forget_left() {
    if (!entered_here) return;
    entered_here->erase(
        std::remove_if(entered_here->begin(), entered_here->end(), [](const auto& entered) { return !entered->open; }),
        entered_here->end());
    if (!entered_here->empty()) return;
    delete entered_here;
    entered_here = nullptr;
}

std::shared_ptr<PoolScope::Entered> enter(Pool pool, uintptr_t task) {
    forget_left();
    if (!entered_here) entered_here = new std::vector<std::shared_ptr<PoolScope::Entered>>;
    for (const auto& other : *entered_here)
        if (other->task && other->task != task)
            throw InvalidState("another asyncio task of this thread is in the memory pool '" + other->pool.tag + kWhy);
    entered_here->push_back(std::shared_ptr<PoolScope::Entered>(new PoolScope::Entered{std::move(pool), task}));
    return entered_here->back();
}

}  // namespace

PoolScope::PoolScope(Pool pool, uintptr_t task) : entered_(enter(std::move(pool), task)) {}

void PoolScope::leave() {
    entered_->open = false;
    forget_left();
}

const Pool& pool_of_thread() {
    if (entered_here)
        for (auto entered = entered_here->rbegin(); entered != entered_here->rend(); ++entered)
            if ((*entered)->open) return (*entered)->pool;
    return *process_pool;
}

void set_process_pool(const Pool& pool, const std::string& driver_path) {
    driver_to_open = new std::string(driver_path);
    process_pool = new Pool(pool);
}

}  // namespace cumem_sleep
