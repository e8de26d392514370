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

// Pages that the driver would not unpin: the GPU may still reach them, so they stay until it does. Never destroyed: at
// exit other threads may still close blocks.
std::mutex kept_mutex;
auto* const kept = new std::vector<std::shared_ptr<HostPages>>;

}  // namespace

HostMemoryError::HostMemoryError(std::string call_name, std::string error_text, size_t wanted)
    : std::runtime_error(call_name + " of " + std::to_string(wanted) + " bytes of host memory: " + error_text),
      call(std::move(call_name)),
      error(std::move(error_text)),
      bytes(wanted) {}

HostPages::HostPages(size_t bytes, int numa_node) : bytes_(whole_pages(bytes)) {
    // Huge pages need addresses aligned to them, which mmap does not promise: take more, give the ends back.
    const size_t whole = bytes_ + kHugePage;
    void* mapped = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw HostMemoryError("mmap", strerror(errno), bytes);
    auto* const begin = static_cast<uint8_t*>(mapped);
    const auto misalignment = reinterpret_cast<uintptr_t>(begin) % kHugePage;
    data_ = begin + (misalignment ? kHugePage - misalignment : 0);
    if (data_ > begin) munmap(begin, data_ - begin);
    uint8_t* const data_end = data_ + bytes_;
    if (begin + whole > data_end) munmap(data_end, begin + whole - data_end);

    // All three are wishes: without them the memory is slower, not wrong. A fork must not make pinned pages
    // copy-on-write: the parent's next write would move them away from where the GPU reads.
    madvise(data_, bytes_, MADV_HUGEPAGE);
    madvise(data_, bytes_, MADV_DONTFORK);
    if (numa_node >= 0 && numa_node < 64) {
        const unsigned long mask = 1ul << numa_node;
        syscall(SYS_mbind, data_, bytes_, kPreferNode, &mask, sizeof mask * 8 + 1, 0);
    }
}

HostPages::~HostPages() {
    // A forked child did not inherit the pages: what lies at their addresses now is not ours.
    if (!Driver::is_forked()) munmap(data_, bytes_);
}

void HostPages::pin(int device) {
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

bool HostPages::give_back() noexcept {
    const bool unpinned = !pinned() || try_twice([this] {
        ContextScope context(pinned_device_);
        RelaxedCaptureScope relaxed;
        return Driver::get().mem_host_unregister.attempt(data_) == CUDA_SUCCESS;
    });
    if (!unpinned) return false;
    pinned_device_ = -1;
    madvise(data_, bytes_, MADV_DONTNEED);
    return true;
}

HostBlock::HostBlock(size_t bytes, int numa_node)
    : bytes_(bytes), pages_(std::make_shared<HostPages>(bytes, numa_node)) {}

void HostBlock::check_open() const {
    if (closed_) throw InvalidState("the host block is closed");
}

void HostBlock::touch(size_t offset, size_t bytes) {
    check_open();
    if (offset > bytes_ || bytes > bytes_ - offset) throw std::out_of_range("touch beyond the block");
    // The kernel reports a shortage here, where a plain write would be killed for it.
    int result = 0;
    do {
        result = madvise(data() + offset, bytes, MADV_POPULATE_WRITE);
    } while (result != 0 && (errno == EINTR || errno == EAGAIN));
    if (result == 0) return;
    if (errno != EINVAL) throw HostMemoryError("madvise", strerror(errno), bytes);
    for (size_t page = 0; page < bytes; page += page_bytes()) static_cast<volatile uint8_t*>(data())[offset + page] = 0;
}

void HostBlock::pin(int device) {
    check_open();
    pages_->pin(device);
}

void HostBlock::close() noexcept {
    if (closed_ || Driver::is_forked()) return;
    closed_ = true;
    if (pages_->give_back()) return;
    std::lock_guard<std::mutex> lock(kept_mutex);
    kept->push_back(pages_);
}

size_t reclaim_host_memory() noexcept {
    if (Driver::is_forked()) return 0;
    std::lock_guard<std::mutex> lock(kept_mutex);
    const auto returned = [](const std::shared_ptr<HostPages>& pages) { return pages->give_back(); };
    kept->erase(std::remove_if(kept->begin(), kept->end(), returned), kept->end());
    size_t bytes = 0;
    for (const auto& pages : *kept) bytes += pages->bytes();
    return bytes;
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
