// Scopes that Python code enters, such as `with` blocks, as the thread sees them that entered them.
//
// They end in any order and on any thread: tasks of one thread overlap, a generator is closed by whoever frees it, and
// an exception that is kept keeps what it interrupted. So a scope saves nothing that its end would put back: each ends
// by itself, wherever it stands. They are opened and closed with the interpreter lock held; the thread that opened them
// looks at them without it.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

namespace cumem_sleep {

// `Scope` has an `std::atomic<bool> open`, unset at its end.
template <typename Scope>
class OpenScopes {
  public:
    using Scopes = std::vector<std::shared_ptr<Scope>>;

    // Those of the calling thread, in the order in which they were opened. Some may have been closed by other threads.
    static const Scopes& here() {
        static const Scopes none;
        return scopes ? *scopes : none;
    }
    static void add(std::shared_ptr<Scope> scope) {
        if (!scopes) scopes = new Scopes;
        scopes->push_back(std::move(scope));
    }
    // Forgets those that are closed.
    static void prune() {
        if (!scopes) return;
        const auto is_closed = [](const auto& scope) { return !scope->open; };
        scopes->erase(std::remove_if(scopes->begin(), scopes->end(), is_closed), scopes->end());
        if (!scopes->empty()) return;
        delete scopes;
        scopes = nullptr;
    }
    static bool any_here() {
        const Scopes& all = here();
        return std::any_of(all.begin(), all.end(), [](const auto& scope) { return scope->open.load(); });
    }

  private:
    // A plain pointer: a thread may still allocate after its thread_local objects are destroyed.
    static inline thread_local Scopes* scopes = nullptr;
};

}  // namespace cumem_sleep
