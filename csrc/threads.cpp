#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>

namespace cumem_sleep {

namespace {

std::atomic<int> threads_allowed{-1};
// Of a thread that is started here. Made by its starter, and so that the thread itself need not allocate: where memory
// is short, the starter gets the error.
struct Started {
    explicit Started(std::string its_name) : name(std::move(its_name)) {}

    const std::string name;
    Started *before = nullptr, *after = nullptr;  // in `at_work`
};

// Needs no destructor, for which the C library would allocate.
thread_local Started* started_here = nullptr;

std::mutex at_work_mutex;
Started* at_work = nullptr;

class AtWork {
  public:
    explicit AtWork(Started& thread) : thread_(thread) {
        started_here = &thread_;
        std::lock_guard<std::mutex> lock(at_work_mutex);
        thread_.after = std::exchange(at_work, &thread_);
        if (thread_.after) thread_.after->before = &thread_;
    }
    ~AtWork() {
        std::lock_guard<std::mutex> lock(at_work_mutex);
        (thread_.before ? thread_.before->after : at_work) = thread_.after;
        if (thread_.after) thread_.after->before = thread_.before;
        started_here = nullptr;
    }
    AtWork(const AtWork&) = delete;
    AtWork& operator=(const AtWork&) = delete;

  private:
    Started& thread_;
};

// Blocks this thread's signals for a scope: a thread started inside inherits that.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t blocked;
        sigfillset(&blocked);
        // Faults of the thread itself: if they were blocked, they would end the process silently.
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) sigdelset(&blocked, fault);
        pthread_sigmask(SIG_SETMASK, &blocked, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    sigset_t before_;
};

// Locked during a fork, whose child would otherwise find it locked for ever if another thread had it just then.
[[maybe_unused]] const int registered =
    pthread_atfork([] { at_work_mutex.lock(); }, [] { at_work_mutex.unlock(); }, [] { at_work_mutex.unlock(); });

}  // namespace

void Event::set() noexcept {
    word_.store(1, std::memory_order_release);
    // From here on the object may be gone; the kernel only looks for threads that wait at this address.
    syscall(SYS_futex, &word_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

bool Event::wait(std::chrono::nanoseconds at_most) const noexcept {
    if (is_set() || at_most <= std::chrono::nanoseconds::zero()) return is_set();
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(at_most);
    const timespec timeout{static_cast<time_t>(seconds.count()), static_cast<long>((at_most - seconds).count())};
    syscall(SYS_futex, &word_, FUTEX_WAIT_PRIVATE, 0, &timeout, nullptr, 0);
    return is_set();
}

std::thread start_thread(const std::string& name, std::function<void()> work) {
    for (int allowed = threads_allowed; allowed >= 0;) {
        if (allowed == 0)
            throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again), "refused");
        if (threads_allowed.compare_exchange_weak(allowed, allowed - 1)) break;
    }
    auto started = std::make_unique<Started>(name);
    const SignalsBlocked blocked;
    return std::thread([started = std::move(started), work = std::move(work)] {
        const AtWork here(*started);
        pthread_setname_np(pthread_self(), started->name.c_str());
        work();
    });
}

std::vector<std::string> thread_names() {
    std::lock_guard<std::mutex> lock(at_work_mutex);
    std::vector<std::string> names;
    for (const Started* thread = at_work; thread; thread = thread->after) names.push_back(thread->name);
    return names;
}

const char* thread_name() { return started_here ? started_here->name.c_str() : ""; }

void allow_threads(int count) noexcept { threads_allowed = count; }

}  // namespace cumem_sleep
