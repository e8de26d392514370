// How devices are told apart, in all processes.
#pragma once

#include "simulation.h"

namespace cumem_sim {

// Of the host's device of this number.
CUuuid uuid_of(int number);

}  // namespace cumem_sim
