// Invariants, as functions: debug builds (those with sanitizers) check them after each change of state, all others
// leave the checks out.
#pragma once

#include <string>

namespace cumem_sleep {

#ifdef CUMEM_DEBUG
constexpr bool kChecksInvariants = true;
#else
constexpr bool kChecksInvariants = false;
#endif

// Prints what was found and ends the process.
[[noreturn]] void stop_for_invalid(const std::string& found) noexcept;

// Ends the process unless `thing` is valid. Costs nothing where invariants are not checked.
template <typename Thing>
void check_valid(const Thing& thing) noexcept {
    if constexpr (kChecksInvariants)
        if (!thing.is_valid()) stop_for_invalid(thing.describe());
}

}  // namespace cumem_sleep
