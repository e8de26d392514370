// Pinned host memory for backups, private to this process or shared with others: exact size, huge pages where the
// system has them, on the GPU's NUMA node, prefaulted by threads, then registered with the driver.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "descriptors.h"

namespace cumem_sleep {

// Host memory could not be allocated or pinned. `call` is the call that failed, `error` its own error text.
class HostMemoryError : public std::runtime_error {
  public:
    HostMemoryError(std::string call, std::string error, size_t bytes);

    std::string call, error;
    size_t bytes;
};

// Pages mapped into this process: mapped by the constructor, unmapped by the destructor, and pinned in between if
// asked.
class HostPages {
  public:
    // Where the pages come from.
    struct Backing {
        int file = -1;         // a memfd, which other processes may map too; -1: private pages
        Descriptor owned;      // the same descriptor, if this object closes it
        bool writable = true;  // by this process
        int numa_node = -1;    // where new pages are allocated; -1: any node
    };

    // Address space for `bytes` (rounded up to whole pages), aligned to huge pages.
    HostPages(size_t bytes, Backing backing);
    ~HostPages();
    HostPages(const HostPages&) = delete;
    HostPages& operator=(const HostPages&) = delete;

    void pin(int device);
    // The bytes stay. False if the driver refuses.
    bool unpin() noexcept;
    // Unpins and frees the memory but keeps the addresses, which then read as zeros. False if the driver refuses. Pages
    // of a file are freed when nobody maps them any more and all of its descriptors are closed.
    bool give_back() noexcept;

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    bool pinned() const { return pinned_device_ >= 0; }
    int pinned_device() const { return pinned_device_; }
    bool writable() const { return backing_.writable; }
    int owned_file() const { return backing_.owned.get(); }
    // True in a forked child, which did not inherit the pages.
    bool is_forked() const;

  private:
    const pid_t process_;
    Backing backing_;
    uint8_t* data_ = nullptr;
    size_t bytes_;
    int pinned_device_ = -1;
};

// One block of host memory. Steps in order: construct (address space only), `prefault` every part (on any threads,
// disjoint parts concurrently), `pin`; then it can be copied to and from, until `unpin`. `close`, or the destructor,
// frees the memory; no copy may be in flight, and the driver's unpinning waits for all work that runs on the device.
// Somebody may still have a view of a closed block, so its addresses stay until the destructor.
class HostBlock {
  public:
    // Private memory. `numa_node` < 0: any node. Throws HostMemoryError.
    HostBlock(size_t bytes, int numa_node);
    // Memory that other processes may map too, by its descriptor: a memfd that can neither shrink nor grow. With
    // `reserved_huge_pages`, all of it comes from the 2 MiB pages that the system has reserved (vm.nr_hugepages).
    // Throws HostMemoryError; InvalidState for a size that is not possible or if no descriptor is left.
    static std::shared_ptr<HostBlock> shared(size_t bytes, int numa_node, bool reserved_huge_pages);
    // Private memory for a table that one operation needs. If it is small, `close` leaves it pinned for the next table
    // of this device, as long as the device has segments; so it may be pinned already, and hold what it held then.
    static std::shared_ptr<HostBlock> table(size_t bytes, int device, int numa_node);
    // Maps all memory of such a block of another process. `fd` may be closed afterwards. Throws InvalidState if `fd` is
    // not such a descriptor, has another size, or is read-only although `writable` is set; HostMemoryError.
    static std::shared_ptr<HostBlock> mapped(int fd, size_t bytes, bool writable);
    ~HostBlock() { close(); }
    HostBlock(const HostBlock&) = delete;
    HostBlock& operator=(const HostBlock&) = delete;

    // Faults in the pages of [offset, offset + bytes). Needs no lock and no context. Throws HostMemoryError.
    void prefault(size_t offset, size_t bytes);
    // Registers the whole block for every device, as read-only memory if it is not writable. Throws HostMemoryError if
    // the driver cannot pin that much, DriverError.
    void pin(int device);
    // Unregisters it; the bytes stay. No copy may be in flight. False if the driver refuses: then it is still pinned.
    bool unpin();
    void close() noexcept;

    uint8_t* data() const { return pages_->data(); }
    size_t bytes() const { return bytes_; }
    bool pinned() const { return !closed_ && pages_->pinned(); }
    int pinned_device() const { return closed_ ? -1 : pages_->pinned_device(); }
    // How many bytes `prefault` has been called for, and for how many of them it has returned.
    size_t prefault_begun_bytes() const { return prefault_begun_bytes_; }
    size_t prefaulted_bytes() const { return prefaulted_bytes_; }
    bool writable() const { return pages_->writable(); }
    // The descriptor of a `shared` block, until it is closed; the block keeps owning it. -1 for all others.
    int fd() const { return closed_ ? -1 : pages_->owned_file(); }
    // The address of a part of the block. Both throw std::out_of_range beyond its end; the second throws InvalidState
    // if it is not writable.
    const uint8_t* part(size_t offset, size_t bytes) const;
    uint8_t* writable_part(size_t offset, size_t bytes) const;

  private:
    HostBlock(size_t bytes, HostPages::Backing backing);
    HostBlock(size_t bytes, std::shared_ptr<HostPages> pages, int table_of);
    void check_open() const;

    const size_t bytes_;
    const std::shared_ptr<HostPages> pages_;
    const int table_of_ = -1;  // the device that it is a small table of; -1: it is none
    bool closed_ = false;
    std::atomic<size_t> prefault_begun_bytes_{0}, prefaulted_bytes_{0};
};

// Unpins and frees what small tables have left pinned for the next ones.
void release_idle_tables(int device) noexcept;

// Retries what the driver refused to unpin when its block was closed. Returns the bytes that are still pinned.
size_t reclaim_host_memory() noexcept;

// The NUMA node of a PCI device, from sysfs; -1 if the system does not say.
int numa_node(const std::string& pci_bus_id);

}  // namespace cumem_sleep
