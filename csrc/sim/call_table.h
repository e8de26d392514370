// The calls that this driver implements: how often each was made, and which of them should fail.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda_api.h"

namespace cumem_sim {

// "cuMemHostRegister_v2" -> "cuMemHostRegister"
std::string without_version(const std::string& symbol);

class CallTable {
  public:
    static constexpr int kUnknown = -1;

    CallTable();

    int find(const std::string& name) const;
    int size() const { return static_cast<int>(calls_.size()); }
    const char* name(int index) const { return calls_.at(static_cast<std::size_t>(index)).name; }
    std::uint64_t made(int index) const { return calls_.at(static_cast<std::size_t>(index)).made; }

    void count(int index) { ++calls_.at(static_cast<std::size_t>(index)).made; }
    void add_failure(int index, std::uint64_t after, CUresult error, std::uint64_t times);

    // The failure that is due for this call, or CUDA_SUCCESS.
    CUresult take_failure(int index);

    void reset();

  private:
    struct Failure {
        std::uint64_t calls_before;
        CUresult error;
        std::uint64_t times_left;
    };
    struct Entry {
        const char* name;
        std::uint64_t made = 0;
        std::vector<Failure> failures;
    };
    std::vector<Entry> calls_;
};

}  // namespace cumem_sim
