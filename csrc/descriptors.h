// File descriptors that come from elsewhere, and those that cannot be had.
#pragma once

#include <cuda.h>

#include <string>
#include <utility>

namespace cumem_sleep {

// A file descriptor that is this object's to close; -1: none.
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

// Throws InvalidState, naming it, unless it is open in this process.
void check_descriptor(int fd);

// Throws InvalidState, which says what to do, if no descriptor can be had any more, for what `call` wanted one.
void check_descriptors_left(const char* call);

// Throws for a failed driver call that needs a descriptor: InvalidState if there is none left, which the driver's own
// error does not tell, else DriverError.
[[noreturn]] void fail_for_descriptors(const char* call, CUresult result, const std::string& memory);

}  // namespace cumem_sleep
