// Which physical memory another process was given to copy from or to, and has not given back yet. Such memory stays
// allocated on the device whatever its owner releases, and a copy to it may still come.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

namespace cumem_sleep {

// Open from its construction until `end`: an object that is lost leaves it open, because nobody knows any better.
class Loan {
  public:
    // `memory`: `Mapping::memory`. `filled`: the other process writes to it.
    Loan(uint64_t memory, bool filled);

    // The other process has given it back, or is gone. Ending it again does nothing.
    void end() noexcept;

  private:
    std::optional<std::pair<uint64_t, bool>> open_;
};

bool is_on_loan(uint64_t memory) noexcept;
bool is_filled_on_loan(uint64_t memory) noexcept;

}  // namespace cumem_sleep
