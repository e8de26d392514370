#include "simulation.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <sstream>
#include <type_traits>

#include "error_names.h"

namespace cumem_sim {

namespace {

// A number from the environment, or `fallback`; a bad one is recorded in `error`.
std::uint64_t number_from_environment(const char* variable, std::uint64_t fallback, std::uint64_t least,
                                      std::uint64_t most, std::string& error) {
    const char* text = std::getenv(variable);
    if (!text || !*text) return fallback;
    char* end = nullptr;
    errno = 0;
    const unsigned long long value = std::strtoull(text, &end, 10);
    const bool is_number = *text >= '0' && *text <= '9' && !*end && !errno;
    if (is_number && value >= least && value <= most) return value;
    error = std::string(variable) + "=\"" + text + "\": expected a whole number from " + std::to_string(least) +
            " to " + std::to_string(most);
    return fallback;
}

// "2,0": ordinal 0 is the host's device 2, ordinal 1 its device 0, and the others follow in their order.
std::vector<int> order_from_environment(std::string& error) {
    const char* const text = std::getenv("CUMEM_SLEEP_SIM_DEVICE_ORDER");
    std::vector<int> order;
    const auto is_named = [&](int number) { return std::find(order.begin(), order.end(), number) != order.end(); };
    for (const char* rest = text; rest && *rest;) {
        char* end = nullptr;
        const long number = std::strtol(rest, &end, 10);
        const bool ends_well = *end == '\0' || (*end == ',' && end[1] != '\0');
        const bool known = *rest >= '0' && *rest <= '9' && ends_well && number < kMaxDevices;
        if (!known || is_named(static_cast<int>(number))) {
            error = std::string("CUMEM_SLEEP_SIM_DEVICE_ORDER=\"") + text + "\": expected different numbers below " +
                    std::to_string(kMaxDevices) + ", separated by commas";
            break;
        }
        order.push_back(static_cast<int>(number));
        rest = *end ? end + 1 : end;
    }
    for (int number = 0; number < kMaxDevices; ++number)
        if (!is_named(number)) order.push_back(number);
    return order;
}

// "cuMemCreate:3:CUDA_ERROR_OUT_OF_MEMORY:2": a call, how many come before, the error, how often. Whether it was one.
bool add_failure(CallTable& calls, const std::string& text) {
    std::istringstream fields(text);
    std::string call, after, error, times;
    std::getline(fields, call, ':');
    std::getline(fields, after, ':');
    std::getline(fields, error, ':');
    std::getline(fields, times);
    const auto is_count = [](const std::string& digits) {
        return !digits.empty() && digits.size() < 19 && digits.find_first_not_of("0123456789") == std::string::npos;
    };
    const int index = calls.find(call);
    const int code = error_code(error);
    if (index == CallTable::kUnknown || code <= 0 || !is_count(after) || !is_count(times)) return false;
    const std::uint64_t count = std::stoull(times);
    calls.add_failure(index, std::stoull(after), static_cast<CUresult>(code), count);
    return count > 0;
}

void add_failures_from_environment(CallTable& calls, std::string& error) {
    const char* const text = std::getenv("CUMEM_SLEEP_SIM_FAIL");
    std::istringstream rules(text ? text : "");
    for (std::string rule; std::getline(rules, rule, ',');) {
        if (add_failure(calls, rule)) continue;
        error = std::string("CUMEM_SLEEP_SIM_FAIL=\"") + text + "\": \"" + rule +
                "\" is not a rule such as cuMemCreate:0:CUDA_ERROR_OUT_OF_MEMORY:1 (call:after:error:times)";
    }
}

// The mutex is held across fork(), so that the child gets a consistent state although it has no other threads.
void before_fork() { Simulation::instance().mutex.lock(); }
void after_fork_in_parent() { Simulation::instance().mutex.unlock(); }
void after_fork_in_child() {
    Simulation& sim = Simulation::instance();
    sim.forked = sim.initialized;
    if (sim.forked) sim.leave_parent(sim);
    sim.mutex.unlock();
}

}  // namespace

Settings Settings::from_environment() {
    Settings settings;
    const auto number = [&settings](const char* variable, std::uint64_t fallback, std::uint64_t least,
                                    std::uint64_t most) {
        return number_from_environment(variable, fallback, least, most, settings.error);
    };
    settings.device_bytes =
        number("CUMEM_SLEEP_SIM_DEVICE_BYTES", settings.device_bytes, kGranularityBytes, std::uint64_t{1} << 46);
    settings.context_bytes = number("CUMEM_SLEEP_SIM_CONTEXT_BYTES", 0, 0, std::uint64_t{1} << 46);
    settings.context_us_per_mib = number("CUMEM_SLEEP_SIM_CONTEXT_US_PER_MIB", 0, 0, 60000000);
    settings.devices = static_cast<int>(number("CUMEM_SLEEP_SIM_DEVICES", 1, 1, kMaxDevices));
    settings.device_order = order_from_environment(settings.error);
    settings.driver_version = static_cast<int>(number("CUMEM_SLEEP_SIM_DRIVER_VERSION", 13000, 1000, 1000000));
    settings.copy_delay_us = static_cast<unsigned>(number("CUMEM_SLEEP_SIM_COPY_DELAY_US", 200, 0, 60000000));
    settings.claims_fabric = number("CUMEM_SLEEP_SIM_FABRIC", 0, 0, 1) == 1;
    settings.host_pointers = number("CUMEM_SLEEP_SIM_HOST_POINTERS", 1, 0, 1) == 1;
    settings.integrated = number("CUMEM_SLEEP_SIM_INTEGRATED", 0, 0, 1) == 1;
    return settings;
}

CUmemAccess_flags Mapping::access_of(int device) const {
    const auto entry = access.find(device);
    return entry == access.end() ? CU_MEM_ACCESS_FLAGS_PROT_NONE : entry->second;
}

Simulation::Simulation() {
    add_failures_from_environment(calls, settings.error);
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

Simulation& Simulation::instance() {
    static Simulation* const simulation = new Simulation;  // leaked: see the head of simulation.h
    return *simulation;
}

Device& Simulation::device(int ordinal) {
    require(ordinal >= 0 && ordinal < settings.devices, CUDA_ERROR_INVALID_DEVICE);
    while (devices.size() <= static_cast<std::size_t>(ordinal)) {
        auto device = std::make_unique<Device>();
        device->ordinal = device->primary.device = static_cast<int>(devices.size());
        device->number = settings.device_order.at(devices.size());
        device->primary.handle = reinterpret_cast<CUcontext>(new_handle());
        devices.push_back(std::move(device));
    }
    return *devices[static_cast<std::size_t>(ordinal)];
}

ThreadState& this_thread() {
    static_assert(std::is_trivially_destructible_v<ThreadState>);
    // Not `thread_local`: for that the C library allocates at the first use, and ends the process if it cannot. Nor is
    // there room beside the stacks, since tests load many copies of this library.
    static const pthread_key_t key = [] {
        pthread_key_t made{};
        require(pthread_key_create(&made, free) == 0, CUDA_ERROR_OUT_OF_MEMORY);
        return made;
    }();
    if (void* const state = pthread_getspecific(key)) return *static_cast<ThreadState*>(state);
    void* const memory = malloc(sizeof(ThreadState));
    require(memory != nullptr, CUDA_ERROR_OUT_OF_MEMORY);
    if (pthread_setspecific(key, memory) != 0) {
        free(memory);
        require(false, CUDA_ERROR_OUT_OF_MEMORY);
    }
    return *new (memory) ThreadState;
}

}  // namespace cumem_sim
