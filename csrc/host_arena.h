// Pinned host memory that backups live in: exact size, huge pages where the system has them, on the GPU's NUMA node,
// touched ahead by threads, then registered with the driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace cumem_sleep {

// The system gave no host memory, or would not pin it. `call` is what refused, `error` its own word for why.
class HostMemoryError : public std::runtime_error {
  public:
    HostMemoryError(std::string call, std::string error, size_t bytes);

    std::string call, error;
    size_t bytes;
};

// Pages of this process: mapped when made, unmapped when destroyed, maybe pinned meanwhile.
class HostPages {
  public:
    // Address space for `bytes` (rounded up to whole pages), aligned to huge pages. `numa_node` < 0: wherever.
    HostPages(size_t bytes, int numa_node);
    ~HostPages();
    HostPages(const HostPages&) = delete;
    HostPages& operator=(const HostPages&) = delete;

    void pin(int device);
    // Unpins and gives the memory back, not the addresses: they read as zeros. False if the driver refuses.
    bool give_back() noexcept;

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    bool pinned() const { return pinned_device_ >= 0; }

  private:
    uint8_t* data_ = nullptr;
    size_t bytes_;
    int pinned_device_ = -1;
};

// One block of host memory. Steps in order: construct (address space only), `touch` every part (any threads, disjoint
// parts at once), `pin`, and it may be copied to and from. `close`, or the destructor, gives the memory back; no copy
// may be in flight, and unpinning waits for all work that runs on the device (the driver does that). Somebody may hold
// a view of a closed block, so its addresses stay until the destructor.
class HostBlock {
  public:
    // `numa_node` < 0: wherever. Throws HostMemoryError.
    HostBlock(size_t bytes, int numa_node);
    ~HostBlock() { close(); }
    HostBlock(const HostBlock&) = delete;
    HostBlock& operator=(const HostBlock&) = delete;

    // Puts physical pages under [offset, offset + bytes). Needs no lock and no context. Throws HostMemoryError.
    void touch(size_t offset, size_t bytes);
    // Registers all of it, for every device. Throws HostMemoryError if the driver cannot pin so much, DriverError.
    void pin(int device);
    void close() noexcept;

    uint8_t* data() const { return pages_->data(); }
    size_t bytes() const { return bytes_; }
    bool pinned() const { return !closed_ && pages_->pinned(); }

  private:
    void check_open() const;

    const size_t bytes_;
    std::shared_ptr<HostPages> pages_;
    bool closed_ = false;
};

// Tries again what the driver would not unpin when its block was closed. Returns the bytes that are still held.
size_t reclaim_host_memory() noexcept;

// The NUMA node that a PCI device hangs on, from sysfs; -1 if the system does not say.
int numa_node(const std::string& pci_bus_id);

}  // namespace cumem_sleep
