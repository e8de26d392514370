#include "process_board.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <thread>

namespace cumem_sim {

namespace {

// Says that the memfd is a board, and one of this size.
constexpr std::uint64_t kLayout = 0x63756d656d000000 | sizeof(Board);
constexpr const char* kName = "cumem-sim-process";

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free,
              "processes share the board's atomics");

std::atomic<Board*> own_board{nullptr};
int own_fd = -1;  // written before own_board

std::string proc(int pid, const std::string& entry) { return "/proc/" + std::to_string(pid) + "/" + entry; }

// 'R', 'S', 'Z' and so on; 0 if there is no such process.
char process_status(int pid) {
    const int fd = open(proc(pid, "stat").c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    char text[512] = "";
    const ssize_t count = read(fd, text, sizeof text - 1);
    close(fd);
    const char* const name_end = count > 0 ? std::strrchr(text, ')') : nullptr;
    return name_end && name_end[1] == ' ' ? name_end[2] : '\0';
}

bool is_process(int pid) {
    const char status = pid > 0 ? process_status(pid) : '\0';
    return status && status != 'Z' && status != 'X';
}

// A descriptor of its own, so that locks on it are this caller's. -1 if the process has no board.
int open_board(int pid) {
    const std::string folder = proc(pid, "fd");
    DIR* const entries = opendir(folder.c_str());
    require(entries || errno != EACCES, CUDA_ERROR_NOT_PERMITTED);
    const std::string wanted = std::string("/memfd:") + kName + " (deleted)";
    int found = -1;
    while (const dirent* entry = entries && found < 0 ? readdir(entries) : nullptr) {
        char target[64] = "";
        const std::string path = folder + "/" + entry->d_name;
        if (readlink(path.c_str(), target, sizeof target - 1) > 0 && target == wanted)
            found = open(path.c_str(), O_RDWR | O_CLOEXEC);
    }
    if (entries) closedir(entries);
    return found;
}

Board* map_board(int fd, int advice) {
    void* const memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) return nullptr;
    madvise(memory, sizeof(Board), advice);
    return static_cast<Board*>(memory);
}

struct flock claim_lock() {
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_len = 1;
    return lock;
}

bool is_claimed(int fd) {
    struct flock lock = claim_lock();
    return fcntl(fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

// A process that was about to lock this one, or had just unlocked it, and died leaves the gate closed. The number tells
// this closing from a later one.
void open_if_abandoned(Board& board) {
    std::uint32_t gate = board.gate;
    const auto is_running = [&] { return board.process_state() == CU_PROCESS_STATE_RUNNING; };
    if (gate % 2 == 1 && is_running() && !is_claimed(own_fd) && is_running())
        board.gate.compare_exchange_strong(gate, gate + 1);
}

}  // namespace

std::uint64_t Board::used_bytes(int ordinal) const {
    const PerDevice& entry = device[ordinal];
    if (!checkpointed) return entry.used_bytes;
    return entry.has_context ? kCheckpointedBytes : 0;
}

void make_board(Simulation& sim) {
    if (own_board.load()) return;
    const int fd = memfd_create(kName, MFD_CLOEXEC);
    require(fd >= 0, CUDA_ERROR_OPERATING_SYSTEM);
    void* const memory = ftruncate(fd, sizeof(Board)) == 0 ? map_board(fd, MADV_DONTFORK) : nullptr;
    if (!memory) {
        close(fd);
        throw Refused{CUDA_ERROR_OPERATING_SYSTEM};
    }
    auto* const board = new (memory) Board{};
    board->pid = getpid();
    for (int ordinal = 0; ordinal < kMaxDevices; ++ordinal)
        board->device[ordinal].number = sim.settings.device_order.at(static_cast<std::size_t>(ordinal));
    own_fd = fd;
    own_board = board;
    publish(sim.settings);
    board->layout = kLayout;
}

// The mapping stayed with the parent.
void leave_board() {
    if (own_board.exchange(nullptr)) close(own_fd);
}

void publish(const Settings& settings) {
    Board* const board = own_board;
    if (!board) return;
    board->device_bytes = settings.device_bytes;
    board->devices = settings.devices;
}

void publish(const Device& device) {
    Board* const board = own_board;
    if (!board) return;
    Board::PerDevice& entry = board->device[device.ordinal];
    entry.used_bytes = device.used_bytes;
    entry.has_context = device.primary.retains > 0;
}

void work_enqueued() {
    if (Board* const board = own_board) ++board->in_progress;
}

void work_ended() {
    if (Board* const board = own_board) --board->in_progress;
}

std::atomic<std::uint64_t>& blocked_calls() {
    static std::atomic<std::uint64_t> count{0};
    return count;
}

Passage::Passage(bool waits) {
    Board* const board = own_board;
    // A host function belongs to work, which a lock waits for.
    if (!waits || !board || this_thread().runs_stream_work) return;
    for (bool blocked = false;; blocked = true) {
        ++board->in_progress;
        if (!board->closed()) break;
        --board->in_progress;
        if (!blocked) ++blocked_calls();
        open_if_abandoned(*board);
        std::this_thread::sleep_for(kPollInterval);
    }
    counted_ = true;
}

Passage::~Passage() {
    if (counted_) work_ended();
}

FoundBoard::FoundBoard(int pid) : pid_(pid) {
    require(is_process(pid), CUDA_ERROR_INVALID_VALUE);
    fd_ = open_board(pid);
    struct stat status{};
    if (fd_ >= 0 && fstat(fd_, &status) == 0 && status.st_size == sizeof(Board)) board_ = map_board(fd_, MADV_DONTFORK);
    if (board_ && board_->layout == kLayout && board_->pid == pid) return;
    if (board_) munmap(board_, sizeof(Board));
    if (fd_ >= 0) close(fd_);
    throw Refused{is_process(pid) ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_INVALID_VALUE};
}

FoundBoard::~FoundBoard() {
    munmap(board_, sizeof(Board));
    close(fd_);
}

void FoundBoard::claim(Clock::time_point deadline) {
    wait(deadline, [this] {
        struct flock lock = claim_lock();
        return fcntl(fd_, F_OFD_SETLK, &lock) == 0;
    });
}

bool FoundBoard::process_lives() const { return is_process(pid_); }

}  // namespace cumem_sim
