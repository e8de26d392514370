// Pinned host memory that backups live in, of this process or shared with others: exact size, huge pages where the
// system has them, on the GPU's NUMA node, touched ahead by threads, then registered with the driver.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "descriptors.h"

namespace cumem_sleep {

// The system gave no host memory, or would not pin it. `call` is what refused, `error` its own word for why.
class HostMemoryError : public std::runtime_error {
  public:
    HostMemoryError(std::string call, std::string error, size_t bytes);

    std::string call, error;
    size_t bytes;
};

// Pages under addresses of this process: mapped when made, unmapped when destroyed, maybe pinned meanwhile.
class HostPages {
  public:
    // Whose the pages are.
    struct Backing {
        int file = -1;         // a memfd, whose pages others may map too; -1: pages of this process alone
        Descriptor owned;      // the same, if it is to be closed with the pages
        bool writable = true;  // by this process
        int numa_node = -1;    // where new pages come from; -1: wherever
    };

    // Address space for `bytes` (rounded up to whole pages), aligned to huge pages.
    HostPages(size_t bytes, Backing backing);
    ~HostPages();
    HostPages(const HostPages&) = delete;
    HostPages& operator=(const HostPages&) = delete;

    void pin(int device);
    // Unpins and gives the memory back, not the addresses: they read as zeros. False if the driver refuses. Pages of a
    // file go when nobody maps them any more and all of its descriptors are closed.
    bool give_back() noexcept;

    uint8_t* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    bool pinned() const { return pinned_device_ >= 0; }
    bool writable() const { return backing_.writable; }
    int owned_file() const { return backing_.owned.get(); }
    // In a child of a fork, which did not inherit the pages.
    bool is_forked() const;

  private:
    const pid_t process_;
    Backing backing_;
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
    // Memory of this process alone. `numa_node` < 0: wherever. Throws HostMemoryError.
    HostBlock(size_t bytes, int numa_node);
    // Memory that other processes may map too, by its descriptor: a memfd that can neither shrink nor grow. Of huge
    // pages of 2 MiB that the system has reserved for whoever asks, if that is wanted; of others none are taken then.
    // Throws HostMemoryError, InvalidState for a size that cannot be or if no descriptor can be had.
    static std::shared_ptr<HostBlock> shared(size_t bytes, int numa_node, bool reserved_huge_pages);
    // The memory of such a block of another process, all of it. `fd` may be closed afterwards. Throws InvalidState for
    // what is no such descriptor, or has another size, or was opened for reading only and is to be written;
    // HostMemoryError.
    static std::shared_ptr<HostBlock> mapped(int fd, size_t bytes, bool writable);
    ~HostBlock() { close(); }
    HostBlock(const HostBlock&) = delete;
    HostBlock& operator=(const HostBlock&) = delete;

    // Puts physical pages under [offset, offset + bytes). Needs no lock and no context. Throws HostMemoryError.
    void touch(size_t offset, size_t bytes);
    // Registers all of it, for every device, and for reading only if it is not writable. Throws HostMemoryError if the
    // driver cannot pin so much, DriverError.
    void pin(int device);
    void close() noexcept;

    uint8_t* data() const { return pages_->data(); }
    size_t bytes() const { return bytes_; }
    bool pinned() const { return !closed_ && pages_->pinned(); }
    bool writable() const { return pages_->writable(); }
    // Of a `shared` block, until it is closed; it stays the block's. -1 for all others.
    int fd() const { return closed_ ? -1 : pages_->owned_file(); }
    // Where a part of the block lies. Throw std::out_of_range beyond it; the second InvalidState if it is not writable.
    const uint8_t* part(size_t offset, size_t bytes) const;
    uint8_t* writable_part(size_t offset, size_t bytes) const;

  private:
    HostBlock(size_t bytes, HostPages::Backing backing);
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
