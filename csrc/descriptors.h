// File descriptors received from other processes, and errors for when none are left.
#pragma once

#include <cuda.h>

#include <string>
#include <utility>

namespace cumem_sleep {

// Owns a file descriptor; -1: none.
class Descriptor {
  public:
    Descriptor() = default;
    explicit Descriptor(int fd) : fd_(fd) {}
    Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
    ~Descriptor() { close(); }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    Descriptor& operator=(Descriptor&&) = delete;

    int get() const { return fd_; }
    void close() noexcept;
    int release() noexcept { return std::exchange(fd_, -1); }

  private:
    int fd_ = -1;
};

// Throws InvalidState, which names the descriptor, unless it is open in this process.
void check_descriptor(int fd);

// Throws InvalidState, which says what to do, if the descriptor limit is reached; `call` is what needed one.
void check_descriptors_left(const char* call);

// Throws for a failed driver call that needs a descriptor: InvalidState if none is left, which the driver's own error
// does not say, else DriverError.
[[noreturn]] void fail_for_descriptors(const char* call, CUresult result, const std::string& memory);

}  // namespace cumem_sleep
