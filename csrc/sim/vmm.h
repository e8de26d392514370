// Device addresses: which mappings lie behind a range.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "simulation.h"

namespace cumem_sim {

// The mappings that cover the range without a gap, in order. Throws Refused if there is a gap.
std::vector<std::shared_ptr<Mapping>> mappings_of(const Simulation& sim, CUdeviceptr address, std::size_t size);

// How much of the device's memory this process uses; memory that others have imported counts until they release it.
std::uint64_t used_bytes(Device& device);
void charge(Device& device, std::uint64_t bytes);
void refund(Device& device, std::uint64_t bytes);

// Whether any part of the range is reserved address space.
bool overlaps_reservation(const Simulation& sim, CUdeviceptr address, std::size_t size);

// Makes every reserved address fault, in a forked child: it has no device memory, and would share its parent's.
void withdraw_device_memory(const Simulation& sim);

}  // namespace cumem_sim
