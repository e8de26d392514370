#include "descriptors.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>

#include "driver.h"

namespace cumem_sleep {

void Descriptor::close() noexcept {
    if (fd_ >= 0) ::close(release());
}

void check_descriptor(int fd) {
    if (fd < 0 || fcntl(fd, F_GETFD) < 0)
        throw InvalidState("fd=" + std::to_string(fd) + ": not an open file descriptor of this process");
}

void check_descriptors_left(const char* call) {
    const Descriptor probe(open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (probe.get() >= 0) return;
    if (errno == EMFILE) {
        rlimit limit{};
        getrlimit(RLIMIT_NOFILE, &limit);
        throw InvalidState(std::string(call) + ": this process has reached its limit of open files, " +
                           std::to_string(limit.rlim_cur) + ": raise it (ulimit -n)");
    }
    if (errno == ENFILE)
        throw InvalidState(std::string(call) + ": this host has reached its limit of open files: raise fs.file-max");
}

void fail_for_descriptors(const char* call, CUresult result, const std::string& memory) {
    check_descriptors_left(call);
    Driver::get().fail(call, result, memory);
}

}  // namespace cumem_sleep
