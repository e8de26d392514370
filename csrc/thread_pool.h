// `ThreadPool`: threads that do work ahead of whoever will wait for it. Nothing here uses the interpreter.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cumem_sleep {

// Threads that run tasks in order. Each task has a key, which says what it is for.
//
// The first tasks begin once all threads have started, or as many threads as there are tasks. Starting a thread takes
// long while tasks fault in pages, because each change of the address space has to wait for them. If not every thread
// can be started, none is used, and the thread that waits does the work.
class ThreadPool {
  public:
    using Task = std::function<void()>;
    using Tasks = std::vector<std::pair<uint64_t, std::vector<Task>>>;

    // `tasks` begin with `start`.
    ThreadPool(int threads, Tasks tasks);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    void start();
    // Appends tasks; they begin at once.
    void add(Tasks tasks);
    // Returns when the tasks of `key` have run. Throws what one of them threw. Waiting again does nothing.
    void wait(uint64_t key);
    // Waits for running tasks and drops those that have not begun. Stopping again does nothing.
    void stop() noexcept;

  private:
    struct Step {
        Task task;
        bool queued = false;  // for a thread
        bool has_run = false;
        std::exception_ptr error;
    };
    using Steps = std::vector<std::shared_ptr<Step>>;

    void note(uint64_t key, std::vector<Task> tasks);
    void submit(const std::vector<uint64_t>& keys);
    bool have_threads(size_t steps);
    void work();
    static void run(Step& step) noexcept;

    const size_t threads_wanted_;
    const pid_t process_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::unordered_map<uint64_t, Steps> steps_;  // that have not been waited for
    std::vector<uint64_t> not_submitted_;
    std::deque<std::shared_ptr<Step>> queue_;
    size_t begun_ = 0;  // threads
    bool stopped_ = false;
    std::mutex stopping_;  // guards `threads_` in `stop`
    std::vector<std::thread> threads_;
};

}  // namespace cumem_sleep
