#include "host_arena.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "driver.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; older C libraries do not name it
#endif

namespace cumem_sleep {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// From linux/mempolicy.h, which is not installed everywhere.
constexpr int kPreferNode = 1;

size_t page_bytes() {
    static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

size_t whole_pages(size_t bytes) { return (bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

struct Pages {
    uint8_t* data;
    size_t bytes;
    int pinned_device;  // negative: not pinned
};

// Pages that the driver would not unpin: the GPU may still reach them, so they stay until it does.
std::mutex kept_mutex;
std::vector<Pages> kept;

bool give_back(const Pages& pages) noexcept {
    const bool unpinned = pages.pinned_device < 0 || try_twice([&] {
                              ContextScope context(pages.pinned_device);
                              RelaxedCaptureScope relaxed;
                              return Driver::get().mem_host_unregister.attempt(pages.data) == CUDA_SUCCESS;
                          });
    return unpinned && munmap(pages.data, pages.bytes) == 0;
}

}  // namespace

HostMemoryError::HostMemoryError(std::string call_name, std::string error_text, size_t wanted)
    : std::runtime_error(call_name + " of " + std::to_string(wanted) + " bytes of host memory: " + error_text),
      call(std::move(call_name)),
      error(std::move(error_text)),
      bytes(wanted) {}

HostBlock::HostBlock(size_t bytes, int numa_node) : bytes_(bytes) {
    // Huge pages need addresses aligned to them, which mmap does not promise: take more, give the ends back.
    const size_t whole = whole_pages(bytes) + kHugePage;
    void* mapped = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw HostMemoryError("mmap", strerror(errno), bytes);
    auto* const begin = static_cast<uint8_t*>(mapped);
    auto* const end = begin + whole;
    const auto misalignment = reinterpret_cast<uintptr_t>(begin) % kHugePage;
    data_ = begin + (misalignment ? kHugePage - misalignment : 0);
    auto* const data_end = data_ + (whole - kHugePage);
    if (data_ > begin) munmap(begin, data_ - begin);
    if (end > data_end) munmap(data_end, end - data_end);

    // All three are wishes: without them the memory is slower, not wrong. A fork must not make pinned pages
    // copy-on-write: the parent's next write would move them away from where the GPU reads.
    madvise(data_, data_end - data_, MADV_HUGEPAGE);
    madvise(data_, data_end - data_, MADV_DONTFORK);
    if (numa_node >= 0 && numa_node < 64) {
        const unsigned long mask = 1ul << numa_node;
        syscall(SYS_mbind, data_, data_end - data_, kPreferNode, &mask, sizeof mask * 8 + 1, 0);
    }
}

void HostBlock::close() noexcept {
    if (!data_ || Driver::is_forked()) return;  // a forked child did not inherit it; what lies there now is not ours
    const Pages pages{data_, whole_pages(bytes_), pinned_device_};
    data_ = nullptr;
    pinned_device_ = -1;
    if (give_back(pages)) return;
    std::lock_guard<std::mutex> lock(kept_mutex);
    kept.push_back(pages);
}

size_t reclaim_host_memory() noexcept {
    if (Driver::is_forked()) return 0;
    std::lock_guard<std::mutex> lock(kept_mutex);
    kept.erase(std::remove_if(kept.begin(), kept.end(), give_back), kept.end());
    size_t bytes = 0;
    for (const Pages& pages : kept) bytes += pages.bytes;
    return bytes;
}

void HostBlock::touch(size_t offset, size_t bytes) {
    if (!data_) throw InvalidState("the host block is closed");
    if (offset > bytes_ || bytes > bytes_ - offset) throw std::out_of_range("touch beyond the block");
    // The kernel reports a shortage here, where a plain write would be killed for it.
    int result = 0;
    do {
        result = madvise(data_ + offset, bytes, MADV_POPULATE_WRITE);
    } while (result != 0 && (errno == EINTR || errno == EAGAIN));
    if (result == 0) return;
    if (errno != EINVAL) throw HostMemoryError("madvise", strerror(errno), bytes);
    for (size_t page = 0; page < bytes; page += page_bytes()) static_cast<volatile uint8_t*>(data_)[offset + page] = 0;
}

void HostBlock::pin(int device) {
    if (!data_) throw InvalidState("the host block is closed");
    if (pinned()) return;
    ContextScope context(device);
    RelaxedCaptureScope relaxed;
    const Driver& driver = Driver::get();
    const CUresult result =
        driver.mem_host_register.attempt(data_, bytes_, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        throw HostMemoryError(driver.mem_host_register.name, driver.error_name(result), bytes_);
    if (result != CUDA_SUCCESS) driver.fail(driver.mem_host_register.name, result);
    pinned_device_ = device;
}

int numa_node(const std::string& pci_bus_id) {
    std::string name = pci_bus_id;
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    const std::string path = "/sys/bus/pci/devices/" + name + "/numa_node";
    int node = -1;
    if (FILE* file = fopen(path.c_str(), "r")) {
        if (fscanf(file, "%d", &node) != 1) node = -1;
        fclose(file);
    }
    return node;
}

}  // namespace cumem_sleep
