#include "tasks.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "thread_role.h"
#include "threads.h"

namespace py = pybind11;

namespace cumem_sleep {

AheadTask map_task(const SegmentPtr& segment) {
    return {[segment] { segment->map(); }};
}

AheadTask prefault_task(const std::shared_ptr<HostBlock>& block, size_t offset, size_t bytes) {
    return {[block, offset, bytes] { block->prefault(offset, bytes); }};
}

AheadTask python_task(py::object work) {
    const std::shared_ptr<py::object> shared(new py::object(std::move(work)), [](py::object* dropped) {
        py::gil_scoped_acquire gil;
        delete dropped;
    });
    return {[shared] {
        py::gil_scoped_acquire gil;
        (*shared)();
    }};
}

void wait_for(Ahead& ahead, uint64_t key) {
    do stop_if_asked();  // first, because tasks that no thread was given run here
    while (!ahead.wait(key, kBetweenLooks));
}

Ahead::Tasks tasks_of(const py::dict& tasks) {
    Ahead::Tasks result;
    for (const auto& [key, mine] : tasks) {
        result.emplace_back(py::cast<uint64_t>(key), std::vector<Ahead::Task>());
        for (const auto& task : mine) result.back().second.push_back(py::cast<const AheadTask&>(task).task);
    }
    return result;
}

}  // namespace cumem_sleep
