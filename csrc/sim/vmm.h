// Physical memory, and device addresses: which mappings lie behind a range.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "simulation.h"

namespace cumem_sim {

// A separate descriptor of memory that another process (or this one) exported.
struct ImportedFile {
    int fd;
};

// One memfd. Its bytes count against the device, in the process that made it, until its handles are released and its
// mappings gone, in every process.
class Physical {
  public:
    Physical(Device& device, std::size_t size, bool exportable);  // throws Refused
    Physical(Device& device, std::size_t size, ImportedFile file);
    ~Physical();  // the state's mutex is held
    Physical(const Physical&) = delete;
    Physical& operator=(const Physical&) = delete;

    std::size_t size() const { return size_; }
    bool exportable() const { return exportable_; }
    const Device& device() const { return device_; }
    int fd() const { return fd_; }
    bool fill(unsigned char value) const;

  private:
    Device& device_;
    std::size_t size_;
    bool exportable_;
    bool is_import_ = false;
    int fd_;
};

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
