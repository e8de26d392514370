#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <system_error>
#include <utility>

namespace cumem_sleep {

namespace {

std::atomic<int> threads_allowed{-1};

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
    const SignalsBlocked blocked;
    return std::thread([name, work = std::move(work)] {
        pthread_setname_np(pthread_self(), name.c_str());
        work();
    });
}

void allow_threads(int count) noexcept { threads_allowed = count; }

}  // namespace cumem_sleep
