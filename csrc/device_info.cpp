#include "device_info.h"

#include <cstdio>

#include "driver.h"
#include "host_memory.h"
#include "vmm.h"

namespace cumem_sleep {

namespace {

std::string uuid_text(const CUuuid& uuid) {
    std::string text = "GPU";
    for (size_t i = 0; i < sizeof uuid.bytes; ++i) {
        char digits[3];
        snprintf(digits, sizeof digits, "%02x", static_cast<unsigned>(static_cast<unsigned char>(uuid.bytes[i])));
        if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
        text += digits;
    }
    return text;
}

}  // namespace

DeviceInfo device_info(int device) {
    check_device(device);
    const Driver& driver = Driver::get();
    const auto attribute = [&](CUdevice_attribute which) {
        int value = 0;
        driver.device_get_attribute(&value, which, device);
        return value;
    };
    DeviceInfo info;
    char text[128] = "";
    driver.device_get_name(text, sizeof text, device);
    info.name = text;
    driver.device_get_pci_bus_id(text, sizeof text, device);
    info.pci_bus_id = text;
    info.numa = numa_node(info.pci_bus_id);
    CUuuid uuid{};
    driver.device_get_uuid(&uuid, device);
    info.uuid = uuid_text(uuid);
    driver.device_total_mem(&info.total_bytes, device);
    info.capability_major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    info.capability_minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    info.host_pointers = attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
    info.integrated = attribute(CU_DEVICE_ATTRIBUTE_INTEGRATED);
    info.virtual_memory = attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    if (!info.virtual_memory) return info;
    const HandleSupport support = handle_support(device);
    info.posix_fd = support.handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    info.fabric = support.handle_types & CU_MEM_HANDLE_TYPE_FABRIC;
    info.gpu_direct_rdma = support.gpu_direct_rdma;
    return info;
}

bool can_access_peer(int device, int peer) {
    check_device(device);
    check_device(peer);
    int can = 0;
    Driver::get().device_can_access_peer(&can, device, peer);
    return can != 0;
}

}  // namespace cumem_sleep
