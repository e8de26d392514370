// The one place that includes <cuda.h>: what it declares is exported, everything else of this library stays hidden.
//
// cuda.h maps names to their current version (cuMemHostRegister is cuMemHostRegister_v2, and so on), so a definition
// written with the plain name exports the symbol that programs built against the same headers look for.
#pragma once

#pragma GCC visibility push(default)
#include <cuda.h>
#pragma GCC visibility pop
