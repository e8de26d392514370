#include "thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "threads.h"

namespace cumem_sleep {

namespace {

constexpr std::chrono::seconds kForAThreadToBegin{1};  // a thread that takes longer counts as not started

}  // namespace

ThreadPool::ThreadPool(int threads, Tasks tasks) : threads_wanted_(static_cast<size_t>(threads)), process_(getpid()) {
    for (auto& [key, mine] : tasks) {
        note(key, std::move(mine));
        not_submitted_.push_back(key);
    }
}

ThreadPool::~ThreadPool() {
    stop();
    // A forked child has none of these threads and must not join them.
    if (process_ != getpid()) new std::vector<std::thread>(std::move(threads_));
}

void ThreadPool::start() { submit(std::exchange(not_submitted_, {})); }

void ThreadPool::add(Tasks tasks) {
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

void ThreadPool::note(uint64_t key, std::vector<Task> tasks) {
    Steps& steps = steps_[key];
    for (Task& task : tasks) {
        steps.push_back(std::make_shared<Step>());
        steps.back()->task = std::move(task);
    }
}

void ThreadPool::submit(const std::vector<uint64_t>& keys) {
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
        for (const auto& step : steps) {
            queue_.push_back(step);
            step->queued = true;  // not before it is: nobody may wait for a step that no thread will run
        }
    }
    changed_.notify_all();
}

// Starts as many threads as these steps can keep busy. If one cannot be started, stops all of them and returns false.
bool ThreadPool::have_threads(size_t steps) {
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

void ThreadPool::wait(uint64_t key) {
    Steps steps;
    {
        std::unique_lock<std::mutex> lock(mutex_);
        const auto found = steps_.find(key);
        if (found == steps_.end()) return;
        steps = found->second;
        const auto will_run = [](const auto& step) { return step->queued && !step->has_run; };
        const auto is_over = [&] { return stopped_ || std::none_of(steps.begin(), steps.end(), will_run); };
        changed_.wait(lock, is_over);
        steps_.erase(key);
    }
    for (const auto& step : steps) {
        if (!step->has_run) run(*step);  // no thread will run it
        if (step->error) std::rethrow_exception(step->error);
    }
}

void ThreadPool::stop() noexcept {
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

void ThreadPool::work() {
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

void ThreadPool::run(Step& step) noexcept {
    try {
        step.task();
    } catch (...) {
        step.error = std::current_exception();
    }
}

}  // namespace cumem_sleep
