#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <system_error>
#include <utility>

namespace cumem_sleep {

namespace {

constexpr std::chrono::seconds kForAThreadToBegin{1};  // a thread that takes longer counts as not started

std::atomic<int> threads_allowed{-1};
thread_local std::string own_name;

std::mutex at_work_mutex;
auto* const at_work = new std::vector<std::string>;  // never destroyed: threads go on while the process exits

class AtWork {
  public:
    AtWork() {
        std::lock_guard<std::mutex> lock(at_work_mutex);
        at_work->push_back(own_name);
    }
    ~AtWork() {
        std::lock_guard<std::mutex> lock(at_work_mutex);
        at_work->erase(std::find(at_work->begin(), at_work->end(), own_name));
    }
    AtWork(const AtWork&) = delete;
    AtWork& operator=(const AtWork&) = delete;
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

}  // namespace

void Event::set() noexcept {
    word_.store(1, std::memory_order_release);
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
        own_name = name;
        pthread_setname_np(pthread_self(), name.c_str());
        const AtWork here;
        work();
    });
}

std::vector<std::string> thread_names() {
    std::lock_guard<std::mutex> lock(at_work_mutex);
    return *at_work;
}

const std::string& thread_name() { return own_name; }

void allow_threads(int count) noexcept { threads_allowed = count; }

Ahead::Ahead(int threads, Tasks tasks) : threads_wanted_(static_cast<size_t>(threads)), process_(getpid()) {
    for (auto& [key, mine] : tasks) {
        note(key, std::move(mine));
        not_submitted_.push_back(key);
    }
}

Ahead::~Ahead() {
    stop();
    // A forked child has none of these threads and must not join them.
    if (process_ != getpid()) new std::vector<std::thread>(std::move(threads_));
}

void Ahead::start() { submit(std::exchange(not_submitted_, {})); }

void Ahead::add(Tasks tasks) {
    std::vector<uint64_t> keys;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto& [key, mine] : tasks) {
            note(key, std::move(mine));
            keys.push_back(key);
        }
    }
    submit(keys);
}

void Ahead::note(uint64_t key, std::vector<Task> tasks) {
    Steps& steps = steps_[key];
    for (Task& task : tasks) {
        steps.push_back(std::make_shared<Step>());
        steps.back()->task = std::move(task);
    }
}

void Ahead::submit(const std::vector<uint64_t>& keys) {
    Steps steps;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (const uint64_t key : keys)
            if (const auto found = steps_.find(key); found != steps_.end())
                steps.insert(steps.end(), found->second.begin(), found->second.end());
        if (stopped_) return;
    }
    if (steps.empty() || !have_threads(steps.size())) return;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (const auto& step : steps) step->queued = true;
        queue_.insert(queue_.end(), steps.begin(), steps.end());
    }
    changed_.notify_all();
}

// Starts as many threads as these steps can keep busy. If one cannot be started, stops all of them and returns false.
bool Ahead::have_threads(size_t steps) {
    const size_t wanted = std::min(threads_wanted_, threads_.size() + steps);
    try {
        threads_.reserve(wanted);
        while (threads_.size() < wanted) threads_.push_back(start_thread("cumem-ahead", [this] { work(); }));
    } catch (const std::exception&) {
        stop();
        return false;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, kForAThreadToBegin, [&] { return begun_ >= wanted; });
    return true;
}

bool Ahead::wait(uint64_t key, std::chrono::nanoseconds at_most) {
    Steps steps;
    {
        std::unique_lock<std::mutex> lock(mutex_);
        const auto found = steps_.find(key);
        if (found == steps_.end()) return true;
        steps = found->second;
        const auto will_run = [](const auto& step) { return step->queued && !step->has_run; };
        const auto is_over = [&] { return stopped_ || std::none_of(steps.begin(), steps.end(), will_run); };
        if (!changed_.wait_for(lock, at_most, is_over)) return false;
        steps_.erase(key);
    }
    for (const auto& step : steps) {
        if (!step->has_run) run(*step);  // no thread will run it
        if (step->error) std::rethrow_exception(step->error);
    }
    return true;
}

void Ahead::stop() noexcept {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopped_ = true;
        queue_.clear();
    }
    changed_.notify_all();
    if (process_ != getpid()) return;
    std::lock_guard<std::mutex> stopping(stopping_);
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

void Ahead::work() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++begun_;
    changed_.notify_all();
    for (;;) {
        changed_.wait(lock, [this] { return stopped_ || !queue_.empty(); });
        if (stopped_) return;
        const std::shared_ptr<Step> step = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        run(*step);
        lock.lock();
        step->has_run = true;
        changed_.notify_all();
    }
}

void Ahead::run(Step& step) noexcept {
    try {
        step.task();
    } catch (...) {
        step.error = std::current_exception();
    }
}

}  // namespace cumem_sleep
