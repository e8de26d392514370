#include "host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
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

#include "descriptors.h"
#include "device_cache.h"
#include "driver.h"
#include "segment_counts.h"
#include "waiting.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ 22  // Linux 5.14; older C libraries name neither
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MFD_HUGETLB
#define MFD_HUGETLB 4U  // Linux 4.14
#endif

namespace cumem_sleep {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// MFD_HUGE_2MB of linux/memfd.h: the base-2 logarithm of the page's size, in the bits from 26 on.
constexpr unsigned kHugePageOfMemfd = 21u << 26;

// From linux/mempolicy.h, which is not installed everywhere.
constexpr int kPreferNode = 1;

size_t page_bytes() {
    static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

size_t whole_pages(size_t bytes) { return (bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

// Reserves `wanted` bytes of inaccessible address space. Huge pages need aligned addresses, which mmap does not
// promise: reserve more, then unmap both ends.
uint8_t* reserve(size_t wanted) {
    const size_t bytes = whole_pages(wanted), whole = bytes + kHugePage;
    if (whole < wanted) throw HostMemoryError("mmap", strerror(ENOMEM), wanted);
    void* mapped = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw HostMemoryError("mmap", strerror(errno), wanted);
    auto* const begin = static_cast<uint8_t*>(mapped);
    const auto misalignment = reinterpret_cast<uintptr_t>(begin) % kHugePage;
    uint8_t* const data = begin + (misalignment ? kHugePage - misalignment : 0);
    if (data > begin) munmap(begin, data - begin);
    if (begin + whole > data + bytes) munmap(data + bytes, begin + whole - (data + bytes));
    return data;
}

// Maps the pages of `file`, or new zeroed pages if it is -1, at `data`.
bool map_over(uint8_t* data, size_t bytes, bool writable, int file) {
    const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    const int kind = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
    return bytes == 0 || mmap(data, bytes, protection, kind | MAP_FIXED, file, 0) != MAP_FAILED;
}

// A memfd of `bytes` bytes for other processes to map; its seals keep anyone from taking pages away from under them.
// Its mode keeps other processes from reopening a read-only descriptor for writing. That guards against mistakes only,
// because the same user may change the mode.
Descriptor new_file(size_t bytes, bool reserved_huge_pages) {
    const unsigned huge = reserved_huge_pages ? MFD_HUGETLB | kHugePageOfMemfd : 0;
    Descriptor file(memfd_create("cumem-sleep", MFD_CLOEXEC | MFD_ALLOW_SEALING | huge));
    const int fd = file.get(), error = errno;
    const auto check = [&](const char* call, int result) {
        if (result < 0) throw HostMemoryError(call, strerror(errno), bytes);
    };
    if (fd < 0) check_descriptors_left("memfd_create");
    errno = error;
    check("memfd_create", fd);
    check("ftruncate", ftruncate(fd, static_cast<off_t>(whole_pages(bytes))));
    check("fcntl", fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW));
    check("fchmod", fchmod(fd, 0400));
    return file;
}

// Throws InvalidState unless `fd` is what `new_file` made for this many bytes.
void check_file(int fd, size_t bytes, bool writable) {
    check_descriptor(fd);
    const std::string name = "fd=" + std::to_string(fd);
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || !(seals & F_SEAL_GROW))
        throw InvalidState(name + ": not shared host memory (a memfd that is sealed against shrinking and growing)");
    struct stat status{};
    if (fstat(fd, &status) != 0) throw InvalidState(name + ": fstat: " + strerror(errno));
    if (status.st_size == 0 || static_cast<size_t>(status.st_size) != whole_pages(bytes))
        throw InvalidState(name + " has " + std::to_string(status.st_size) +
                           " bytes, which does not match bytes=" + std::to_string(bytes));
    if (writable && (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDWR)
        throw InvalidState(name + " was opened read-only: it cannot be mapped for writing");
}

// Pages that the driver would not unpin: the GPU may still reach them, so they stay until it does. Never destroyed: at
// exit other threads may still close blocks.
std::mutex kept_mutex;
auto* const kept = new std::vector<std::shared_ptr<HostPages>>;

// For the digests of half a GiB: an operation on more takes so long that pinning its table does not matter.
constexpr size_t kSmallTable = size_t{16} << 10;
// An operation has one, and `prepare` beside it another. Never destroyed, as above.
auto* const cached_tables = new DeviceCache<std::shared_ptr<HostPages>>(2);

void give_back(const std::shared_ptr<HostPages>& pages) noexcept {
    if (pages->give_back()) return;
    std::lock_guard<std::mutex> lock(kept_mutex);
    kept->push_back(pages);
}

}  // namespace

HostMemoryError::HostMemoryError(std::string call_name, std::string error_text, size_t wanted)
    : std::runtime_error(call_name + " of " + std::to_string(wanted) + " bytes of host memory: " + error_text),
      call(std::move(call_name)),
      error(std::move(error_text)),
      bytes(wanted) {}

HostPages::HostPages(size_t bytes, Backing backing)
    : process_(getpid()), backing_(std::move(backing)), data_(reserve(bytes)), bytes_(whole_pages(bytes)) {
    if (!map_over(data_, bytes_, writable(), backing_.file)) {
        const int error = errno;
        munmap(data_, bytes_);
        throw HostMemoryError("mmap", strerror(error), bytes);
    }
    // All three are optional: without them the memory is slower, not wrong. A fork must not make pinned pages
    // copy-on-write: the parent's next write would move them away from where the GPU reads.
    madvise(data_, bytes_, MADV_HUGEPAGE);
    madvise(data_, bytes_, MADV_DONTFORK);
    if (backing_.numa_node >= 0 && backing_.numa_node < 64) {
        const unsigned long mask = 1ul << backing_.numa_node;
        syscall(SYS_mbind, data_, bytes_, kPreferNode, &mask, sizeof mask * 8 + 1, 0);
    }
}

HostPages::~HostPages() {
    // In a forked child these addresses and this descriptor may belong to something else.
    if (is_forked())
        backing_.owned.release();
    else
        munmap(data_, bytes_);
}

bool HostPages::is_forked() const { return process_ != getpid(); }

void HostPages::pin(int device) {
    if (pinned()) return;
    ContextScope context(device);
    RelaxedCaptureScope relaxed;
    const Driver& driver = Driver::get();
    unsigned int flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    if (!writable()) flags |= CU_MEMHOSTREGISTER_READ_ONLY;
    const CUresult result = driver.mem_host_register.attempt(data_, bytes_, flags);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        throw HostMemoryError(driver.mem_host_register.name, driver.error_name(result), bytes_);
    if (result != CUDA_SUCCESS) driver.fail(driver.mem_host_register.name, result);
    pinned_device_ = device;
}

bool HostPages::unpin() noexcept {
    const bool unpinned = !pinned() || try_twice([this] {
        ContextScope context(pinned_device_);
        RelaxedCaptureScope relaxed;
        wait_for_work_left(pinned_device_);
        return Driver::get().mem_host_unregister.attempt(data_) == CUDA_SUCCESS;
    });
    if (unpinned) pinned_device_ = -1;
    return unpinned;
}

bool HostPages::give_back() noexcept {
    if (is_forked()) return true;
    if (!unpin()) return false;
    if (backing_.file < 0)
        madvise(data_, bytes_, MADV_DONTNEED);
    else
        map_over(data_, bytes_, writable(), -1);
    backing_.owned.close();
    return true;
}

HostBlock::HostBlock(size_t bytes, HostPages::Backing backing)
    : bytes_(bytes), pages_(std::make_shared<HostPages>(bytes, std::move(backing))) {}

HostBlock::HostBlock(size_t bytes, std::shared_ptr<HostPages> pages, int table_of)
    : bytes_(bytes), pages_(std::move(pages)), table_of_(table_of) {}

HostBlock::HostBlock(size_t bytes, int numa_node) : HostBlock(bytes, HostPages::Backing{-1, {}, true, numa_node}) {}

std::shared_ptr<HostBlock> HostBlock::shared(size_t bytes, int numa_node, bool reserved_huge_pages) {
    if (bytes == 0) throw InvalidState("bytes=0: a shared block needs at least one byte");
    if (reserved_huge_pages && bytes % kHugePage != 0)
        throw InvalidState("bytes=" + std::to_string(bytes) + ": not a multiple of a huge page");
    Descriptor file = new_file(bytes, reserved_huge_pages);
    const int fd = file.get();
    return std::shared_ptr<HostBlock>(new HostBlock(bytes, {fd, std::move(file), true, numa_node}));
}

std::shared_ptr<HostBlock> HostBlock::table(size_t bytes, int device, int numa_node) {
    Driver::get();
    if (bytes > kSmallTable) return std::make_shared<HostBlock>(bytes, numa_node);
    std::shared_ptr<HostPages> pages = cached_tables->take(device).value_or(nullptr);
    if (!pages) pages = std::make_shared<HostPages>(kSmallTable, HostPages::Backing{-1, {}, true, numa_node});
    return std::shared_ptr<HostBlock>(new HostBlock(bytes, std::move(pages), device));
}

std::shared_ptr<HostBlock> HostBlock::mapped(int fd, size_t bytes, bool writable) {
    check_file(fd, bytes, writable);
    return std::shared_ptr<HostBlock>(new HostBlock(bytes, {fd, {}, writable, -1}));
}

const uint8_t* HostBlock::part(size_t offset, size_t bytes) const {
    if (offset > bytes_ || bytes > bytes_ - offset) throw std::out_of_range("beyond the block");
    return data() + offset;
}

uint8_t* HostBlock::writable_part(size_t offset, size_t bytes) const {
    part(offset, bytes);
    if (!writable()) throw InvalidState("the host block was mapped read-only");
    return data() + offset;
}

void HostBlock::check_open() const {
    if (closed_) throw InvalidState("the host block is closed");
    if (pages_->is_forked())
        throw InvalidState("the host block was made before this process was forked: make a new one");
}

void HostBlock::prefault(size_t offset, size_t bytes) {
    check_open();
    if (offset > bytes_ || bytes > bytes_ - offset) throw std::out_of_range("prefault beyond the block");
    prefault_begun_bytes_ += bytes;
    const int advice = writable() ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
    // The kernel reports a shortage here; a plain write would get the process killed.
    int result = 0;
    do {
        result = madvise(data() + offset, bytes, advice);
    } while (result != 0 && (errno == EINTR || errno == EAGAIN));
    if (result != 0) {
        if (errno != EINVAL) throw HostMemoryError("madvise", strerror(errno), bytes);
        volatile uint8_t* const first = data() + offset;
        for (size_t page = 0; page < bytes; page += page_bytes()) {
            if (writable())
                first[page] = 0;
            else
                static_cast<void>(first[page]);
        }
    }
    prefaulted_bytes_ += bytes;
}

void HostBlock::pin(int device) {
    check_open();
    pages_->pin(device);
}

bool HostBlock::unpin() {
    check_open();
    return pages_->unpin();
}

void HostBlock::close() noexcept {
    if (closed_ || Driver::is_forked()) return;
    closed_ = true;
    if (table_of_ < 0 || !cached_tables->keep(table_of_, pages_))
        give_back(pages_);
    else if (!has_segments(table_of_))
        release_idle_tables(table_of_);
}

void release_idle_tables(int device) noexcept {
    for (const auto& pages : cached_tables->take_all(device)) give_back(pages);
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
