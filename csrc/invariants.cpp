#include "invariants.h"

#include <cstdio>
#include <cstdlib>

namespace cumem_sleep {

void stop_for_invalid(const std::string& found) noexcept {
    fprintf(stderr, "cumem-sleep: invalid state: %s\n", found.c_str());
    std::abort();
}

}  // namespace cumem_sleep
