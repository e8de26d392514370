// `HeapReserve`: memory of the C library's heap, faulted in before it is needed. Nothing here uses the interpreter.
#pragma once

#include <cstddef>

namespace cumem_sleep {

// While it exists, this thread can allocate about `bytes` in small pieces without a system call and without a page
// fault. A thread's heap grows in small steps, and while other threads prefault pages each step waits for them, often
// for 20 ms. The driver allocates on the thread that registers host memory.
class HeapReserve {
  public:
    // At most `kMostBytes`; less if the system gives less. May be destroyed on any thread.
    explicit HeapReserve(size_t bytes);
    ~HeapReserve();
    HeapReserve(const HeapReserve&) = delete;
    HeapReserve& operator=(const HeapReserve&) = delete;

    static constexpr size_t kMostBytes = size_t{32} << 20;  // half of what one heap of a thread can hold

  private:
    void* end_ = nullptr;  // keeps the heap from shrinking to below what is free now
};

}  // namespace cumem_sleep
