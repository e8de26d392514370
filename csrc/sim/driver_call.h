// The one way into the simulated driver: what every exported cu* call does before its own part.
#pragma once

#include <mutex>
#include <new>
#include <system_error>

#include "process_board.h"
#include "simulation.h"

namespace cumem_sim {

// All but the first and kInitThoughLocked wait while this process is locked by a checkpoint call of another.
enum class Needs { kNothing, kUnlocked, kInitThoughLocked, kInit, kContext };

// What a call body works with.
struct Call {
    Simulation& sim;
    Lock& lock;
    Context* context;  // current on the calling thread; set if the call needs one

    template <typename Ready>
    void wait(Ready ready) {
        sim.progress.wait(lock, ready);
    }
};

// Counts the call, applies an injected failure, and checks what the call needs. Throws Refused.
Call enter(Simulation& sim, Lock& lock, const char* name, Needs needs);

// `name` is the CUDA name without version suffix; `body` takes a Call& and returns a CUresult or throws Refused.
// Nothing else is caught: a thread that is cancelled inside (Python at exit) must be able to unwind.
template <typename Body>
CUresult driver_call(const char* name, Needs needs, Body body) {
    Simulation& sim = Simulation::instance();
    // Before the lock, which calls that never wait take too.
    const Passage passage(needs != Needs::kNothing && needs != Needs::kInitThoughLocked);
    try {
        Lock lock(sim.mutex);
        Call call = enter(sim, lock, name, needs);
        return body(call);
    } catch (const Refused& refused) {
        return refused.result;
    } catch (const std::bad_alloc&) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    } catch (const std::system_error&) {
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
}

}  // namespace cumem_sim
