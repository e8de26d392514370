#include "copy_stream.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "copy_kernel.h"
#include "device_cache.h"
#include "digest_kernel.h"
#include "driver.h"
#include "segment_counts.h"
#include "waiting.h"

namespace cumem_sleep {

namespace {

// An operation has four to copy, and some to digest or encode. Never destroyed: at exit other threads may still copy.
auto* const cached_streams = new DeviceCache<CUstream>(8);

void wait_for(int device, CUstream stream) {
    ContextScope context(device);
    RelaxedCaptureScope relaxed;
    Driver::get().stream_synchronize(stream);
}

void destroy(int device, CUstream stream) noexcept {
    try_twice([&] {
        ContextScope context(device);
        RelaxedCaptureScope relaxed;
        return Driver::get().stream_destroy.attempt(stream) == CUDA_SUCCESS;
    });
}

}  // namespace

void release_idle_streams(int device) noexcept {
    for (const CUstream stream : cached_streams->take_all(device)) destroy(device, stream);
}

CopyStream::CopyStream(int device) : device_(device) {
    ContextScope context(device_);  // where no call may be made, none is taken either
    stream_ = cached_streams->take(device_).value_or(nullptr);
    if (!stream_) Driver::get().stream_create(&stream_, CU_STREAM_NON_BLOCKING);
}

void CopyStream::close() noexcept {
    if (!stream_ || Driver::is_forked()) return;
    const CUstream stream = std::exchange(stream_, nullptr);
    // Destroying a stream does not wait for its work, and the caller frees the memory next. So if the driver refuses to
    // wait for the stream, wait for the device, as a last resort in the way that invalidates captures. If it refuses
    // that, too, whoever takes the memory away waits (`wait_for_work_left`).
    const auto waited = [](auto&& wait) {
        return try_twice([&] {
            wait();
            return true;
        });
    };
    const bool is_idle = waited([&] { wait_for(device_, stream); });
    if (!is_idle && !waited([this] { wait_for_running_work(device_); }) &&
        !waited([this] { cumem_sleep::synchronize(device_); }))
        note_work_left(device_);
    if (!is_idle || !cached_streams->keep(device_, stream))
        destroy(device_, stream);
    else if (!has_segments(device_))
        release_idle_streams(device_);
}

void CopyStream::to_host(const HostBlock& block, size_t offset, CUdeviceptr address, size_t bytes) {
    uint8_t* const host = block.writable_part(offset, bytes);
    ContextScope context(device_);
    Driver::get().memcpy_dtoh_async(host, address, bytes, stream_);
}

void CopyStream::to_device(CUdeviceptr address, const HostBlock& block, size_t offset, size_t bytes) {
    const uint8_t* const host = block.part(offset, bytes);
    ContextScope context(device_);
    Driver::get().memcpy_htod_async(address, host, bytes, stream_);
}

void CopyStream::to_device_by_kernel(CUdeviceptr address, const HostBlock& block, size_t offset, size_t bytes,
                                     unsigned int blocks) {
    const uint8_t* const host = block.part(offset, bytes);
    if (!block.pinned()) throw InvalidState("a kernel copies from host memory that is registered");
    if (address % 16 != 0 || reinterpret_cast<uintptr_t>(host) % 16 != 0)
        throw InvalidState("a kernel copies between addresses that are multiples of 16");
    ContextScope context(device_);
    const size_t rest = launch_copy(device_, address, host, bytes, blocks, stream_);
    if (rest) Driver::get().memcpy_htod_async(address + bytes - rest, host + bytes - rest, rest, stream_);
}

void CopyStream::within_devices(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    ContextScope context(device_);
    Driver::get().memcpy_dtod_async(to, from, bytes, stream_);
}

void CopyStream::follow(const CopyStream& other) {
    const Driver& driver = Driver::get();
    ContextScope others(other.device_);
    CUevent event = nullptr;
    driver.event_create(&event, CU_EVENT_DISABLE_TIMING);
    try {
        driver.event_record(event, other.stream_);
        ContextScope context(device_);
        driver.stream_wait_event(stream_, event, CU_EVENT_WAIT_DEFAULT);
    } catch (...) {
        driver.event_destroy.attempt(event);
        throw;
    }
    driver.event_destroy.attempt(event);
}

void CopyStream::copy_pieces(const HostBlock& table, size_t begin, const HostBlock& block, const Rows& pieces,
                             bool to_host) {
    ContextScope context(device_);
    if (!table.pinned() || !block.pinned())
        throw InvalidState("a kernel copies to and from host memory that is registered");
    const size_t room = table.bytes() / sizeof(CopyPiece);
    if (begin > room || pieces.count > room - begin) throw std::out_of_range("more pieces than the table has room for");
    auto* piece =
        reinterpret_cast<CopyPiece*>(table.writable_part(begin * sizeof(CopyPiece), pieces.count * sizeof(CopyPiece)));
    const CopyPiece* const first = piece;
    for (const auto& [address, offset, bytes] : pieces) {
        const auto host =
            reinterpret_cast<uint64_t>(to_host ? block.writable_part(offset, bytes) : block.part(offset, bytes));
        if ((address | host | bytes) % 16 != 0)
            throw InvalidState("a kernel copies multiples of 16 bytes between addresses that are multiples of 16");
        *piece++ = to_host ? CopyPiece{host, address, bytes, 0} : CopyPiece{address, host, bytes, 0};
    }
    launch_copy_pieces(device_, first, pieces.count, stream_);
}

size_t CopyStream::digest(const HostBlock& table, size_t begin, const Rows& contents) {
    ContextScope context(device_);  // a forked child has no table to write to
    if (!table.pinned()) throw InvalidState("the table of a digest is in host memory that is registered");
    const size_t room = table.bytes() / (sizeof(DigestChunk) + sizeof(DigestSums));
    size_t count = 0;
    for (const auto& [address, bytes, first_chunk] : contents) {
        if ((address | bytes) % 16 != 0)
            throw InvalidState("a kernel digests multiples of 16 bytes at addresses that are multiples of 16");
        count += (bytes + kDigestChunkBytes - 1) / kDigestChunkBytes;
    }
    if (begin > room || count > room - begin) throw std::out_of_range("more chunks than the table has room for");
    auto* chunk =
        reinterpret_cast<DigestChunk*>(table.writable_part(begin * sizeof(DigestChunk), count * sizeof(DigestChunk)));
    auto* const sums = reinterpret_cast<DigestSums*>(
        table.writable_part(room * sizeof(DigestChunk) + begin * sizeof(DigestSums), count * sizeof(DigestSums)));
    std::fill_n(sums, count, DigestSums{});  // what an earlier kernel left is not to be taken for a sum of these
    const DigestChunk* const first = chunk;
    for (const auto& [address, bytes, first_chunk] : contents) {
        auto number = static_cast<uint32_t>(first_chunk);
        for (uint64_t at = 0; at < bytes; at += kDigestChunkBytes)
            *chunk++ = {address + at, number++,
                        static_cast<uint32_t>(std::min<uint64_t>(bytes - at, kDigestChunkBytes))};
    }
    launch_digest(device_, first, sums, count, stream_);
    return count;
}

void CopyStream::fill(CUdeviceptr address, unsigned char byte, size_t bytes) {
    ContextScope context(device_);
    if ((address | bytes) % 4 == 0)
        Driver::get().memset_d32_async(address, byte * 0x01010101u, bytes / 4, stream_);
    else
        Driver::get().memset_d8_async(address, byte, bytes, stream_);
}

void CopyStream::synchronize() { wait_for(device_, stream_); }

}  // namespace cumem_sleep
