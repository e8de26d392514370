#include "labels.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "open_scopes.h"

namespace cumem_sleep {

namespace {

using Here = OpenScopes<OpenLabel>;

std::atomic<const Label*> process_label{nullptr};

// One copy of each label, never destroyed: a thread may allocate while the process exits.
const Label* kept(const Label& label) {
    static std::mutex mutex;
    static auto* const labels = new std::set<Label>;
    std::lock_guard<std::mutex> lock(mutex);
    return &*labels->insert(label).first;
}

const Label& of_no_pool() {
    static const Label* const label = kept({});
    return *label;
}

const Label& of_process() {
    const Label* label = process_label;
    return label ? *label : of_no_pool();
}

bool is_inside(const OpenLabel& inner, const OpenLabel& outer) {
    const OpenLabel* each = inner.outer.get();
    while (each && each != &outer) each = each->outer.get();
    return each != nullptr;
}

// Whether it counts for a task: nothing was opened in it that is still open.
bool is_innermost(const OpenLabel& opened) {
    const auto& here = Here::here();
    return std::none_of(here.begin(), here.end(),
                        [&](const auto& each) { return each->open && is_inside(*each, opened); });
}

// The label that counts for every task of this thread that is in any (null: there is none); whether they differ.
std::pair<const Label*, bool> common_here() {
    const Label* common = nullptr;
    for (const auto& each : Here::here()) {
        if (!each->open || !is_innermost(*each)) continue;
        if (common && common != each->label) return {nullptr, true};
        common = each->label;
    }
    return {common, false};
}

// Chains stay as long as what is open, however many overlap one after the other.
void prune() {
    for (const auto& each : Here::here())
        while (each->outer && !each->outer->open) each->outer = each->outer->outer;
    Here::prune();
}

}  // namespace

std::shared_ptr<OpenLabel> open_label(const Label& label, const std::shared_ptr<OpenLabel>& outer) {
    prune();
    auto opened = std::make_shared<OpenLabel>();
    opened->label = kept(label);
    opened->outer = in_force(outer);
    Here::add(opened);
    return opened;
}

void close_label(OpenLabel& opened) {
    opened.open = false;
    prune();
}

std::shared_ptr<OpenLabel> in_force(const std::shared_ptr<OpenLabel>& opened) {
    const auto& here = Here::here();
    for (std::shared_ptr<OpenLabel> each = opened; each; each = each->outer)
        if (each->open && std::find(here.begin(), here.end(), each) != here.end()) return each;
    return nullptr;
}

const Label& label_of_task(const std::shared_ptr<OpenLabel>& opened) {
    const std::shared_ptr<OpenLabel> found = in_force(opened);
    return found ? *found->label : of_process();
}

const Label& label_of_thread() {
    const auto [common, differ] = common_here();
    if (differ) return of_no_pool();
    return common ? *common : of_process();
}

bool labels_overlap() { return common_here().second; }

void set_process_label(const Label& label, const std::string& driver_path) {
    driver_to_open = &kept({driver_path})->tag;
    process_label = kept(label);
}

}  // namespace cumem_sleep
