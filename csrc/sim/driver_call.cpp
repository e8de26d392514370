#include "driver_call.h"

#include <cstdio>
#include <cstdlib>

namespace cumem_sim {

Call enter(Simulation& sim, Lock& lock, const char* name, Needs needs) {
    const int index = sim.calls.find(name);
    if (index == CallTable::kUnknown) {
        std::fprintf(stderr, "libcuda_sim: %s is missing from the table of calls\n", name);
        std::abort();
    }
    sim.calls.count(index);
    if (needs != Needs::kNothing && needs != Needs::kUnlocked) {
        require(sim.initialized && !sim.forked, CUDA_ERROR_NOT_INITIALIZED);
        // CUDA forbids driver calls from host functions: a program that made one would hang on a GPU.
        require(!this_thread().runs_stream_work, CUDA_ERROR_NOT_PERMITTED);
    }
    const CUresult failure = sim.calls.take_failure(index);
    require(failure == CUDA_SUCCESS, failure);

    Context* context = nullptr;
    if (needs == Needs::kContext) {
        require(!this_thread().contexts.empty(), CUDA_ERROR_INVALID_CONTEXT);
        context = this_thread().contexts.back();
        require(context->retains > 0, CUDA_ERROR_CONTEXT_IS_DESTROYED);
    }
    return Call{sim, lock, context};
}

}  // namespace cumem_sim
