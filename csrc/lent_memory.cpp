#include "lent_memory.h"

#include <mutex>
#include <set>

namespace cumem_sleep {

namespace {

std::mutex mutex;
auto* const open_loans = new std::multiset<std::pair<uint64_t, bool>>;  // never destroyed: memory may be freed at exit

bool has_open(const std::pair<uint64_t, bool>& loan) {
    std::lock_guard<std::mutex> lock(mutex);
    return open_loans->count(loan) > 0;
}

}  // namespace

Loan::Loan(uint64_t memory, bool filled) : open_({memory, filled}) {
    std::lock_guard<std::mutex> lock(mutex);
    open_loans->insert(*open_);
}

void Loan::end() noexcept {
    std::lock_guard<std::mutex> lock(mutex);
    if (open_) open_loans->erase(open_loans->find(*open_));
    open_.reset();
}

bool is_on_loan(uint64_t memory) noexcept { return is_filled_on_loan(memory) || has_open({memory, false}); }

bool is_filled_on_loan(uint64_t memory) noexcept { return has_open({memory, true}); }

}  // namespace cumem_sleep
