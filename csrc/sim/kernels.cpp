// The layer's own kernels: their PTX is not run, but known by their names.
//
// Where a GPU would fault, because kernels do not reach host memory, or an address is not aligned, the work fails.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "touching.h"

using namespace cumem_sim;

namespace {

struct Grid {
    unsigned int blocks, threads;
};

// Checks the arguments of a launch, and notes what it touches; returns the work.
using Launch = std::function<bool()> (*)(Call& call, Footprint& footprint, void** arguments, Grid grid);

// Whether kernels reach all host memory of the work.
bool is_reached(const Call& call, const Footprint& footprint) {
    return call.sim.settings.host_pointers && !footprint.pageable();
}

// For `transfer_all`: from host memory to a file, and back.
auto writing_from(const char* source) {
    return [source](int file, std::size_t at, std::size_t size, off_t offset) {
        return syscall(SYS_pwrite64, file, source + at, size, offset);
    };
}
auto reading_to(char* target) {
    return [target](int file, std::size_t at, std::size_t size, off_t offset) {
        return syscall(SYS_pread64, file, target + at, size, offset);
    };
}

std::function<bool()> copy(Call& call, Footprint& footprint, void** arguments, Grid) {
    const auto target = *static_cast<CUdeviceptr*>(arguments[0]);
    const auto source = *static_cast<const char**>(arguments[1]);
    const auto bytes = static_cast<std::size_t>(*static_cast<std::uint64_t*>(arguments[2]));
    footprint.add_device_memory(call.sim, target, bytes, Access::kWrite);
    footprint.add_host_memory(call.sim, source, bytes, Access::kRead);
    const bool reaches =
        is_reached(call, footprint) && (target | reinterpret_cast<CUdeviceptr>(source) | bytes) % 16 == 0;
    return [=, mappings = mappings_of(call.sim, target, bytes)] {
        return reaches && transfer_all(mappings, target, bytes, writing_from(source));
    };
}

// Copies host memory by way of a file: so memory that the program has unmapped gives an error, and not a fault.
class HostCopies {
  public:
    HostCopies() : file_(memfd_create("host-copies", MFD_CLOEXEC)) {}
    ~HostCopies() { close(file_); }
    HostCopies(const HostCopies&) = delete;
    HostCopies& operator=(const HostCopies&) = delete;

    bool copy(void* target, const void* source, std::size_t size) const {
        return moved(SYS_pwrite64, const_cast<void*>(source), size) && moved(SYS_pread64, target, size);
    }

  private:
    bool moved(long call, void* memory, std::size_t size) const {
        for (std::size_t at = 0; at < size;) {
            const long count = syscall(call, file_, static_cast<char*>(memory) + at, size - at, at);
            if (count < 0 && errno == EINTR) continue;
            if (count <= 0) return false;
            at += static_cast<std::size_t>(count);
        }
        return true;
    }

    const int file_;
};

struct Piece {
    std::uint64_t target, source, bytes, unused;
    bool operator==(const Piece& other) const {
        return target == other.target && source == other.source && bytes == other.bytes;
    }
};

// One side of each piece is device memory. The table is read twice, as that of `digest`.
std::function<bool()> copy_pieces(Call& call, Footprint& footprint, void** arguments, Grid) {
    const auto table = *static_cast<const Piece**>(arguments[0]);
    const auto count = static_cast<std::size_t>(*static_cast<std::uint64_t*>(arguments[1]));
    const std::size_t table_bytes = count * sizeof(Piece);
    footprint.add_host_memory(call.sim, table, table_bytes, Access::kRead);
    std::vector<Piece> pieces(count);
    require(HostCopies().copy(pieces.data(), table, table_bytes), CUDA_ERROR_INVALID_VALUE);
    auto alignment = reinterpret_cast<std::uint64_t>(table);
    std::vector<std::function<bool()>> copies;
    for (const auto& [target, source, bytes, unused] : pieces) {
        alignment |= target | source | bytes;
        auto* const host = reinterpret_cast<char*>(overlaps_reservation(call.sim, target, bytes) ? source : target);
        if (host == reinterpret_cast<char*>(source)) {
            footprint.add_device_memory(call.sim, target, bytes, Access::kWrite);
            footprint.add_host_memory(call.sim, host, bytes, Access::kRead);
            copies.emplace_back([=, to = target, nbytes = bytes, mappings = mappings_of(call.sim, target, bytes)] {
                return transfer_all(mappings, to, nbytes, writing_from(host));
            });
        } else {
            footprint.add_device_memory(call.sim, source, bytes, Access::kRead);
            footprint.add_host_memory(call.sim, host, bytes, Access::kWrite);
            copies.emplace_back([=, from = source, nbytes = bytes, mappings = mappings_of(call.sim, source, bytes)] {
                return transfer_all(mappings, from, nbytes, reading_to(host));
            });
        }
    }
    return [=, reaches = is_reached(call, footprint) && alignment % 16 == 0] {
        std::vector<Piece> now(count);
        if (!reaches || !HostCopies().copy(now.data(), table, table_bytes) || now != pieces) return false;
        return std::all_of(copies.begin(), copies.end(), [](const auto& each) { return each(); });
    };
}

using Sums = std::array<std::uint64_t, 2>;

constexpr std::size_t kLanes = 2048, kRows = 64, kChunkBytes = kLanes * kRows * 8;

std::uint64_t mixed(std::uint64_t state) {
    for (const std::uint64_t factor : {0xFF51AFD7ED558CCDull, 0xC4CEB9FE1A85EC53ull}) {
        state ^= state >> 33;
        state *= factor;
    }
    return state ^ state >> 33;
}

// The definition is in `cumem_sleep/digest/reference.py`.
Sums digest_of(const std::uint64_t* words, std::size_t count, std::uint64_t number) {
    std::array<Sums, kLanes> lanes;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
        const std::uint64_t start = number * kLanes + lane + 1;
        lanes[lane] = {start * 0xD6E8FEB86659FD93ull, start * 0xA0761D6478BD642Full};
    }
    for (std::size_t at = 0; at < count; ++at) {
        auto& [a, b] = lanes[at % kLanes];
        const std::uint64_t word = words[at];
        a = (a ^ word) * 0x9E3779B97F4A7C15ull;
        a ^= a >> 32;
        b = (b ^ (word << 32 | word >> 32)) * 0xBF58476D1CE4E5B9ull;
        b ^= b >> 29;
    }
    Sums sums{};
    for (const auto& [a, b] : lanes) sums = {sums[0] + mixed(a), sums[1] + mixed(b)};
    return sums;
}

struct Chunk {
    std::uint64_t address;
    std::uint32_t number, bytes;
    bool operator==(const Chunk& other) const {
        return address == other.address && number == other.number && bytes == other.bytes;
    }
};

constexpr unsigned int kThreads = 512;

// The table is read when the work is enqueued, too, to know what it touches; if it is another one by the time that the
// stream reaches it, the program has written to it too early.
std::function<bool()> digest(Call& call, Footprint& footprint, void** arguments, Grid grid) {
    require(grid.threads == kThreads, CUDA_ERROR_INVALID_VALUE);
    const auto table = *static_cast<const Chunk**>(arguments[0]);
    const auto sums = *static_cast<Sums**>(arguments[1]);
    const std::size_t table_bytes = grid.blocks * sizeof(Chunk);
    footprint.add_host_memory(call.sim, table, table_bytes, Access::kRead);
    footprint.add_host_memory(call.sim, sums, grid.blocks * sizeof(Sums), Access::kWrite);
    std::vector<Chunk> chunks(grid.blocks);
    require(HostCopies().copy(chunks.data(), table, table_bytes), CUDA_ERROR_INVALID_VALUE);
    auto alignment = reinterpret_cast<std::uint64_t>(table) | reinterpret_cast<std::uint64_t>(sums);
    std::vector<std::vector<std::shared_ptr<Mapping>>> mappings;
    for (const Chunk& chunk : chunks) {
        require(chunk.bytes <= kChunkBytes, CUDA_ERROR_INVALID_VALUE);
        alignment |= chunk.address | chunk.bytes;
        footprint.add_host_memory(call.sim, reinterpret_cast<const void*>(chunk.address), chunk.bytes, Access::kRead);
        mappings.push_back(overlaps_reservation(call.sim, chunk.address, chunk.bytes)
                               ? mappings_of(call.sim, chunk.address, chunk.bytes)
                               : std::vector<std::shared_ptr<Mapping>>());
    }
    return [=, reaches = is_reached(call, footprint) && alignment % 16 == 0] {
        const HostCopies host;
        std::vector<Chunk> now(chunks.size());
        if (!reaches || !host.copy(now.data(), table, table_bytes) || now != chunks) return false;
        std::vector<std::uint64_t> words(kChunkBytes / 8);
        auto* const bytes = reinterpret_cast<char*>(words.data());
        for (std::size_t at = 0; at < chunks.size(); ++at) {
            const auto& [address, number, size] = chunks[at];
            const bool found = mappings[at].empty() ? host.copy(bytes, reinterpret_cast<const void*>(address), size)
                                                    : transfer_all(mappings[at], address, size, reading_to(bytes));
            const Sums of_chunk = digest_of(words.data(), size / 8, number);
            if (!found || !host.copy(&sums[at], &of_chunk, sizeof(Sums))) return false;
        }
        return true;
    };
}

struct Kernel {
    const char* name;
    Launch launch;
};
constexpr Kernel kKernels[] = {
    {"cumem_sleep_copy_pieces", copy_pieces},  // before the one whose name begins like it
    {"cumem_sleep_copy", copy},
    {"cumem_sleep_digest", digest},
};

// The handles of a kernel's module and of its function are the kernel itself.
template <typename Handle>
const Kernel& kernel_of(Handle handle, CUresult otherwise) {
    const auto* const kernel = reinterpret_cast<const Kernel*>(handle);
    require(std::any_of(std::begin(kKernels), std::end(kKernels), [=](const Kernel& each) { return &each == kernel; }),
            otherwise);
    return *kernel;
}

template <typename Handle>
Handle handle_of(const Kernel& kernel) {
    return reinterpret_cast<Handle>(const_cast<Kernel*>(&kernel));
}

}  // namespace

CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
    return driver_call("cuModuleLoadData", Needs::kContext, [&](Call&) {
        require(module && image, CUDA_ERROR_INVALID_VALUE);
        const auto* const known = std::find_if(std::begin(kKernels), std::end(kKernels), [=](const Kernel& kernel) {
            return std::strstr(static_cast<const char*>(image), kernel.name);
        });
        require(known != std::end(kKernels), CUDA_ERROR_INVALID_PTX);
        *module = handle_of<CUmodule>(*known);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    return driver_call("cuModuleGetFunction", Needs::kContext, [&](Call&) {
        require(function && name, CUDA_ERROR_INVALID_VALUE);
        const Kernel& kernel = kernel_of(module, CUDA_ERROR_INVALID_VALUE);
        require(std::strcmp(name, kernel.name) == 0, CUDA_ERROR_NOT_FOUND);
        *function = handle_of<CUfunction>(kernel);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned int blocks, unsigned int blocks_y, unsigned int blocks_z,
                                unsigned int threads, unsigned int threads_y, unsigned int threads_z, unsigned int,
                                CUstream handle, void** arguments, void** extra) {
    return driver_call("cuLaunchKernel", Needs::kContext, [&](Call& call) {
        const auto stream = stream_for_work(call, handle);
        const Kernel& kernel = kernel_of(function, CUDA_ERROR_INVALID_HANDLE);
        const Grid grid{blocks * blocks_y * blocks_z, threads * threads_y * threads_z};
        require(arguments && !extra && grid.blocks * grid.threads > 0, CUDA_ERROR_INVALID_VALUE);
        Footprint footprint(*call.context);
        auto work = kernel.launch(call, footprint, arguments, grid);
        enqueue_touching(call, stream, std::move(footprint), std::move(work));
        return CUDA_SUCCESS;
    });
}
