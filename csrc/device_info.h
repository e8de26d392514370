// What is known about a GPU before anything is allocated on it.
#pragma once

#include <cstddef>
#include <string>

namespace cumem_sleep {

struct DeviceInfo {
    std::string name, pci_bus_id;
    // "GPU-" and 8-4-4-4-12 hexadecimal digits, as nvidia-smi prints it. Processes may number a host's GPUs differently
    // (CUDA_VISIBLE_DEVICES); this is the same in all of them.
    std::string uuid;
    size_t total_bytes = 0;
    int capability_major = 0, capability_minor = 0, numa = -1;
    bool virtual_memory = false, posix_fd = false, fabric = false, gpu_direct_rdma = false;
    bool host_pointers = false;  // kernels can access registered host memory by its host address
    bool integrated = false;     // its memory is the host's (GB10)
};

// Throws InvalidState for a device that does not exist, DriverError.
DeviceInfo device_info(int device);

// Whether copies of `device` reach the memory of `peer`. Throws as `device_info`.
bool can_access_peer(int device, int peer);

}  // namespace cumem_sleep
