// How fast a GPU reads pinned host memory: by its copy engine, by kernels as the layer's, and by bulk copies to shared
// memory (TMA), which need Hopper; idle, and right after 60 GiB were released, while the driver scrubs them.
//
//     nvcc -O2 -std=c++17 -arch=sm_90 -cudart static benchmarks/host_reads.cu -o host_reads -lcuda && ./host_reads
//
// Each copies 2 GiB: three times idle, of which the fastest counts, and twice right after a release. Bytes are
// compared.

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr size_t kBytes = size_t{2} << 30;
constexpr size_t kLaunchBytes = size_t{16} << 20;
constexpr size_t kReleasedBytes = size_t{60} << 30, kHandleBytes = size_t{256} << 20;

void check(cudaError_t result, const char* call) {
    if (result == cudaSuccess) return;
    std::printf("%s: %s\n", call, cudaGetErrorString(result));
    std::exit(1);
}
#define CHECK(call) check(call, #call)

enum class Load { kPlain, kL2By256, kOnceL2By256, kOnceL2By128, kVolatile };

template <Load kHow>
__device__ uint4 loaded(const uint4* from) {
    uint4 v;
#define LOAD(how) \
    asm volatile("ld." how ".v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from))
    if constexpr (kHow == Load::kPlain) v = *from;
    if constexpr (kHow == Load::kL2By256) LOAD("global.L2::256B");
    if constexpr (kHow == Load::kOnceL2By256) LOAD("global.nc.L1::no_allocate.L2::256B");
    if constexpr (kHow == Load::kOnceL2By128) LOAD("global.nc.L1::no_allocate.L2::128B");
    if constexpr (kHow == Load::kVolatile) LOAD("volatile.global");
#undef LOAD
    return v;
}

// As in csrc/copy_kernel.cpp: four words of each thread are in flight, a grid apart.
template <Load kHow>
__global__ void copy_by_grid(uint4* to, const uint4* from, uint64_t words) {
    const uint64_t step = gridDim.x * blockDim.x;
    for (uint64_t at = blockIdx.x * blockDim.x + threadIdx.x; at + 3 * step < words; at += 4 * step) {
        const uint4 a = loaded<kHow>(from + at), b = loaded<kHow>(from + at + step);
        const uint4 c = loaded<kHow>(from + at + 2 * step), d = loaded<kHow>(from + at + 3 * step);
        to[at] = a, to[at + step] = b, to[at + 2 * step] = c, to[at + 3 * step] = d;
    }
}

// Each warp reads 2 KiB that lie together.
__global__ void copy_by_warp(uint4* to, const uint4* from, uint64_t words) {
    const uint64_t warps = gridDim.x * blockDim.x / 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    for (uint64_t at = warp * 128 + threadIdx.x % 32; at < words; at += warps * 128) {
        const uint4 a = from[at], b = from[at + 32], c = from[at + 64], d = from[at + 96];
        to[at] = a, to[at + 32] = b, to[at + 64] = c, to[at + 96] = d;
    }
}

// One thread of each block keeps so many bulk copies in flight.
template <int kStages>
__global__ void copy_in_bulk(char* to, const char* from, uint64_t bytes, uint32_t chunk) {
    extern __shared__ __align__(128) char buffer[];
    __shared__ __align__(8) uint64_t barriers[kStages];
    if (threadIdx.x) return;
    const auto stages = static_cast<uint32_t>(__cvta_generic_to_shared(buffer));
    const auto bars = static_cast<uint32_t>(__cvta_generic_to_shared(barriers));
    for (int i = 0; i < kStages; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(bars + 8 * i));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("fence.proxy.async;");
    const uint64_t chunks = bytes / chunk, mine = (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x;
    const auto place = [&](uint64_t k) { return (blockIdx.x + k * gridDim.x) * static_cast<uint64_t>(chunk); };
    const auto load = [&](uint64_t k) {
        const uint32_t stage = k % kStages;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(bars + 8 * stage), "r"(chunk));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(
                         stages + stage * chunk),
                     "l"(from + place(k)), "r"(chunk), "r"(bars + 8 * stage)
                     : "memory");
    };
    for (uint64_t k = 0; k < mine && k < kStages; k++) load(k);
    for (uint64_t k = 0; k < mine; k++) {
        const uint32_t stage = k % kStages, parity = (k / kStages) & 1;
        uint32_t is_there = 0;
        while (!is_there)
            asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
                         : "=r"(is_there)
                         : "r"(bars + 8 * stage), "r"(parity)
                         : "memory");
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" ::"l"(to + place(k)),
                     "r"(stages + stage * chunk), "r"(chunk)
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;");
        if (k >= 1 && k - 1 + kStages < mine) {  // the stage before is free when its store has been read
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
            load(k - 1 + kStages);
        }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// The driver scrubs what is released here.
void release_much() {
    std::vector<CUmemGenericAllocationHandle> handles;
    CUmemAllocationProp kind{};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    for (size_t bytes = 0; bytes < kReleasedBytes; bytes += kHandleBytes) {
        CUmemGenericAllocationHandle handle;
        if (cuMemCreate(&handle, kHandleBytes, &kind, 0) != CUDA_SUCCESS) break;
        handles.push_back(handle);
    }
    for (const auto handle : handles) cuMemRelease(handle);
}

struct Bench {
    char* host;
    char* device;
    cudaStream_t stream;

    void run(const std::string& name, const std::function<void(size_t)>& copy) const {
        CHECK(cudaMemsetAsync(device, 0, kBytes, stream));
        copy(kBytes);
        CHECK(cudaStreamSynchronize(stream));
        std::vector<char> back(kBytes / 16);
        bool same = true;
        for (const size_t at : {kBytes / 3 / 16 * 16, kBytes - back.size()}) {
            CHECK(cudaMemcpy(back.data(), device + at, back.size(), cudaMemcpyDeviceToHost));
            same = same && !std::memcmp(back.data(), host + at, back.size());
        }
        const auto seconds = [&](int times) {
            const auto begin = std::chrono::steady_clock::now();
            for (int i = 0; i < times; i++) copy(kBytes);
            CHECK(cudaStreamSynchronize(stream));
            return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        };
        const double idle = std::min({seconds(1), seconds(1), seconds(1)});
        release_much();
        const double busy = seconds(2);
        std::printf("%-32s idle %.1f GB/s, after a release %.1f GB/s%s\n", name.c_str(), kBytes / idle / 1e9,
                    2 * kBytes / busy / 1e9, same ? "" : ", WRONG BYTES");
        std::this_thread::sleep_for(std::chrono::milliseconds(600));
    }

    // By launches that copy so many bytes each.
    void run_in_parts(const std::string& name, const std::function<void(char*, const char*, size_t)>& copy) const {
        run(name, [&](size_t bytes) {
            for (size_t at = 0; at < bytes; at += kLaunchBytes) copy(device + at, host + at, kLaunchBytes);
        });
    }
};

template <Load kHow>
void run_grid(const Bench& bench, const std::string& name) {
    bench.run_in_parts(name, [&](char* to, const char* from, size_t bytes) {
        copy_by_grid<kHow><<<16, 512, 0, bench.stream>>>(reinterpret_cast<uint4*>(to),
                                                         reinterpret_cast<const uint4*>(from), bytes / 16);
    });
}

template <int kStages>
void run_bulk(const Bench& bench, int blocks, uint32_t chunk) {
    CHECK(cudaFuncSetAttribute(copy_in_bulk<kStages>, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
    bench.run("bulk, " + std::to_string(blocks) + " blocks x " + std::to_string(kStages) + " x " +
                  std::to_string(chunk >> 10) + " KiB",
              [&](size_t bytes) {
                  copy_in_bulk<kStages>
                      <<<blocks, 32, kStages * chunk, bench.stream>>>(bench.device, bench.host, bytes, chunk);
              });
}

}  // namespace

int main() {
    Bench bench{static_cast<char*>(std::aligned_alloc(size_t{2} << 20, kBytes)), nullptr, nullptr};
    std::memset(bench.host, 1, kBytes);
    for (size_t at = 0; at < kBytes; at += 4096) *reinterpret_cast<uint64_t*>(bench.host + at) = at * 2654435761u;
    CHECK(cudaHostRegister(bench.host, kBytes, cudaHostRegisterDefault));
    CHECK(cudaMalloc(&bench.device, kBytes));
    CHECK(cudaStreamCreateWithFlags(&bench.stream, cudaStreamNonBlocking));
    cudaDeviceProp facts;
    CHECK(cudaGetDeviceProperties(&facts, 0));
    std::printf("%s\n", facts.name);

    bench.run("copy engine", [&](size_t bytes) {
        CHECK(cudaMemcpyAsync(bench.device, bench.host, bytes, cudaMemcpyHostToDevice, bench.stream));
    });
    run_grid<Load::kPlain>(bench, "16 x 512 threads, 16 MiB each");
    for (const int blocks : {16, 32, 64})
        bench.run(std::to_string(blocks) + " x 1024 threads, one launch", [&](size_t bytes) {
            copy_by_grid<Load::kPlain><<<blocks, 1024, 0, bench.stream>>>(
                reinterpret_cast<uint4*>(bench.device), reinterpret_cast<const uint4*>(bench.host), bytes / 16);
        });
    bench.run_in_parts("2 KiB together, 16 MiB each", [&](char* to, const char* from, size_t bytes) {
        copy_by_warp<<<16, 512, 0, bench.stream>>>(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from),
                                                   bytes / 16);
    });
    run_grid<Load::kL2By256>(bench, "L2::256B");
    run_grid<Load::kOnceL2By256>(bench, "nc, L2::256B");
    run_grid<Load::kOnceL2By128>(bench, "nc, L2::128B");
    run_grid<Load::kVolatile>(bench, "volatile");
    for (const int blocks : {4, 16, 32})
        for (const uint32_t chunk : {4u << 10, 16u << 10}) run_bulk<4>(bench, blocks, chunk);
    for (const int blocks : {4, 16}) run_bulk<12>(bench, blocks, 16u << 10);
}
