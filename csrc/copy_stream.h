// Ordered asynchronous copies between a device and pinned host memory, on a stream that nobody else uses meanwhile.
#pragma once

#include <cuda.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "host_memory.h"

namespace cumem_sleep {

// A table of numbers that lies elsewhere.
struct Rows {
    const std::array<uint64_t, 3>* first;
    size_t count;

    const std::array<uint64_t, 3>* begin() const { return first; }
    const std::array<uint64_t, 3>* end() const { return first + count; }
};

// Copies run in the order of the calls. Both sides of a copy must stay until `synchronize` has returned, or `close` or
// the destructor, which wait too. Every call works on any thread and leaves its current context unchanged; it throws
// DriverError if the driver refuses.
//
// Making and destroying the driver's streams takes as long for little memory as for much. So a few that `close` has
// found idle are kept for the next operations, as long as the device has segments.
class CopyStream {
  public:
    explicit CopyStream(int device);
    ~CopyStream() { close(); }
    CopyStream(const CopyStream&) = delete;
    CopyStream& operator=(const CopyStream&) = delete;

    // Throw std::out_of_range beyond the block.
    void to_host(const HostBlock& block, size_t offset, CUdeviceptr address, size_t bytes);
    void to_device(CUdeviceptr address, const HostBlock& block, size_t offset, size_t bytes);
    // By a kernel, not by the copy engine; `address` and the block's are multiples of 16. The device has to say that
    // kernels reach registered host memory by its host address (`DeviceInfo::host_pointers`).
    void to_device_by_kernel(CUdeviceptr address, const HostBlock& block, size_t offset, size_t bytes,
                             unsigned int blocks);
    // Between two ranges of memory that this device reaches, its own or a peer's.
    void within_devices(CUdeviceptr to, CUdeviceptr from, size_t bytes);
    // What is enqueued from here on waits for what `other`, of any device, has now.
    void follow(const CopyStream& other);
    // By a kernel as well: rows of (device's address, offset in the block, bytes), all multiples of 16, from the device
    // to the block or back. `table` is registered, and has room for as many `CopyPiece` as fit; the ones from `begin`
    // on are used, until the stream was waited for.
    void copy_pieces(const HostBlock& table, size_t begin, const HostBlock& block, const Rows& pieces, bool to_host);
    // Digests contents (address, bytes, number of the first chunk) of memory that kernels reach. `table` is registered,
    // and has room for as many `DigestChunk`, and then as many `DigestSums`, as fit; the ones from `begin` on are used,
    // until the stream was waited for. Returns how many.
    size_t digest(const HostBlock& table, size_t begin, const Rows& contents);
    void fill(CUdeviceptr address, unsigned char byte, size_t bytes);
    void synchronize();
    void close() noexcept;

    int device() const { return device_; }
    CUstream handle() const { return stream_; }

  private:
    const int device_;
    CUstream stream_ = nullptr;
};

// Destroys the streams that are kept for the next operations.
void release_idle_streams(int device) noexcept;

}  // namespace cumem_sleep
