// Labels: what an allocation is given. Who is in a pool or a region allocates with its label.
//
// Two may ask, and get the same answer unless tasks overlap on a thread:
// - Python code (`malloc`) asks for its task: what that task entered counts, and what it inherited from the task that
//   started it, as a context variable does.
// - The hooks ask for their thread. They cannot know the task, because they have no interpreter lock; nor can PyTorch,
//   which routes the allocations of a whole thread to the pool that was entered last. Where tasks are in pools of
//   different labels at once, PyTorch's memory is therefore given the label without a choice: that of no pool, whose
//   bytes no level drops.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <tuple>

namespace cumem_sleep {

// What decides about the bytes at a sleep. Memory of a pool (kByLevel) and of a region sleep apart from each
// other, by calls of their own.
enum class BackupPlan {
    kByLevel,  // of a pool: the level, or the tags of the call
    kAlways,   // of a region whose bytes are kept
    kNever,    // of a region whose bytes are dropped
};

// What an allocation is given, and keeps.
struct Label {
    std::string tag = "default";
    BackupPlan backup = BackupPlan::kByLevel;

    bool operator<(const Label& other) const { return std::tie(tag, backup) < std::tie(other.tag, other.backup); }
};

// A label in force, on the thread that opened it, until it is closed (open_scopes.h).
struct OpenLabel {
    const Label* label;
    std::shared_ptr<OpenLabel> outer;  // what was in force for the task that opened it
    std::atomic<bool> open{true};
};

// For the calling thread, within `outer` (null: within nothing).
std::shared_ptr<OpenLabel> open_label(const Label& label, const std::shared_ptr<OpenLabel>& outer);
// On any thread.
void close_label(OpenLabel& opened);
// The innermost label from `opened` outwards that is open, and was opened on the calling thread; null if none is.
std::shared_ptr<OpenLabel> in_force(const std::shared_ptr<OpenLabel>& opened);
// What the allocations of a task get for which this label is in force.
const Label& label_of_task(const std::shared_ptr<OpenLabel>& opened);

// What the hooks' allocations on the calling thread get.
const Label& label_of_thread();
// Whether tasks of the calling thread are in pools or regions of different labels.
bool labels_overlap();

// The label where nothing was entered; memory of a pool called "default" until set. The driver at `driver_path` is
// opened when the preload hook asks for the first time, so that this touches no GPU.
void set_process_label(const Label& label, const std::string& driver_path);
inline std::atomic<const std::string*> driver_to_open{nullptr};  // null again once it could not be opened

}  // namespace cumem_sleep
