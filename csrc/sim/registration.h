// Host memory that is registered (pinned), and what kind of host memory an address is.
#pragma once

#include <memory>

#include "driver_call.h"
#include "simulation.h"

namespace cumem_sim {

// The registration that contains the whole range; null if the range is pageable. A range that is only partly
// registered, or that this process has not mapped, is refused, as in CUDA.
std::shared_ptr<Registration> find_registration(const Simulation& sim, const void* address, std::size_t size);

// Drops what a context registered; waits for copies that use it.
void unregister_all(Call& call, const Context& context);

}  // namespace cumem_sim
