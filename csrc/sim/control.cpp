#include "control.h"

#include "error_names.h"
#include "process_board.h"
#include "simulation.h"

using namespace cumem_sim;

int cumemSimConfigure(std::uint64_t device_bytes, int devices) {
    if (devices < 0 || devices > kMaxDevices) return 1;
    Simulation& sim = Simulation::instance();
    const Lock lock(sim.mutex);
    if (device_bytes > 0) sim.settings.device_bytes = device_bytes;
    if (devices > 0) sim.settings.devices = devices;
    publish(sim.settings);
    return 0;
}

void cumemSimSetContextBytes(std::uint64_t context_bytes) {
    Simulation& sim = Simulation::instance();
    const Lock lock(sim.mutex);
    sim.settings.context_bytes = context_bytes;
}

void cumemSimSetContextTime(std::uint64_t us_per_mib) {
    Simulation& sim = Simulation::instance();
    const Lock lock(sim.mutex);
    sim.settings.context_us_per_mib = us_per_mib;
}

int cumemSimFail(const char* call, std::uint64_t after, int error, std::uint64_t times) {
    Simulation& sim = Simulation::instance();
    const Lock lock(sim.mutex);
    const int index = call ? sim.calls.find(call) : CallTable::kUnknown;
    if (index == CallTable::kUnknown || error == CUDA_SUCCESS || !error_name(error)) return 1;
    sim.calls.add_failure(index, after, static_cast<CUresult>(error), times);
    return 0;
}

void cumemSimReset() {
    Simulation& sim = Simulation::instance();
    const Lock lock(sim.mutex);
    sim.calls.reset();
    blocked_calls() = 0;
    for (const auto& device : sim.devices) device->primary.fault = CUDA_SUCCESS;
}

void cumemSimStats(CumemSimStatistics* statistics) {
    Simulation& sim = Simulation::instance();
    const Lock lock(sim.mutex);
    *statistics = CumemSimStatistics{};
    statistics->blocked_calls = blocked_calls();
    statistics->live_handles = sim.handles.size();
    for (const auto& [base, mapping] : sim.mappings) statistics->mapped_bytes += mapping->size;
    for (const auto& [base, size] : sim.reservations) statistics->reserved_bytes += size;
    for (const auto& [base, registration] : sim.registrations) statistics->registered_bytes += registration->size;
}

int cumemSimCallCount() { return Simulation::instance().calls.size(); }

const char* cumemSimCallName(int index) {
    const CallTable& calls = Simulation::instance().calls;
    return index >= 0 && index < calls.size() ? calls.name(index) : nullptr;
}

std::uint64_t cumemSimCallsMade(int index) {
    Simulation& sim = Simulation::instance();
    const Lock lock(sim.mutex);
    return index >= 0 && index < sim.calls.size() ? sim.calls.made(index) : 0;
}

int cumemSimErrorCode(const char* name) { return name ? error_code(name) : -1; }
