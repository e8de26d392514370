// Python bindings: names, arguments, docstrings. Every function that calls the driver, or may wait, runs without the
// interpreter lock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "allocator.h"
#include "checkpoint.h"
#include "copy_kernel.h"
#include "copy_stream.h"
#include "device_info.h"
#include "digest_kernel.h"
#include "driver.h"
#include "errors.h"
#include "free_listener.h"
#include "host_memory.h"
#include "interpreter.h"
#include "invariants.h"
#include "operation_lock.h"
#include "pools.h"
#include "scopes.h"
#include "scratch.h"
#include "shared_memory.h"
#include "tasks.h"
#include "thread_role.h"
#include "threads.h"
#include "waiting.h"
#include "worker.h"

namespace py = pybind11;
using namespace cumem_sleep;

namespace {

using NoGil = py::call_guard<WithoutInterpreter>;

void bind_driver(py::module_& module) {
    module.def("open_driver", &Driver::open, py::arg("path"), NoGil(),
               "Open libcuda (or a simulated driver) from `path` and initialise it; once per process.");
    module.def("driver_is_open", &Driver::is_open);
    module.def("driver_is_forked", &Driver::is_forked);
    module.def("driver_path", &driver_path, "Of this process's driver; None if it has no usable one.");
    module.def("driver_is_simulated", &driver_is_simulated);
    module.def("driver_version", [] { return Driver::get().version(); });

    module.def(
        "suspend_driver_calls",
        [](double timeout_s) {
            return suspend_driver_calls(std::chrono::nanoseconds(static_cast<int64_t>(timeout_s * 1e9)));
        },
        py::arg("timeout_s"), NoGil(), "Let driver calls fail from now on; False: some did not end in time.");
    module.def("resume_driver_calls", &resume_driver_calls);
    module.def("driver_calls_suspended", &driver_calls_suspended);
    module.def("driver_is_leased", &driver_is_leased);

    module.def("device_count", &device_count, NoGil());
    module.def("device_info", &device_info, py::arg("device"), NoGil());
    module.def("can_access_peer", &can_access_peer, py::arg("device"), py::arg("peer"), NoGil());
    module.def(
        "memory_info",
        [](int device) {
            const MemoryInfo info = memory_info(device);
            return std::make_pair(info.free_bytes, info.total_bytes);
        },
        py::arg("device"), NoGil(), "(free, total) bytes of the device. Creates its primary context if need be.");
    module.def("synchronize", &synchronize, py::arg("device"), NoGil());
    module.def("wait_for_running_work", &wait_for_running_work, py::arg("device"), NoGil(),
               "As `synchronize`, and leaves graph captures intact.");
    module.def("release_waiter", &release_waiter, py::arg("device"), NoGil(),
               "Free the device page that makes waiting cheap, if there is one; waits for the device.");
}

void bind_checkpoint(py::module_& module) {
    py::enum_<ProcessState>(module, "ProcessState")
        .value("RUNNING", ProcessState::kRunning)
        .value("LOCKED", ProcessState::kLocked)
        .value("CHECKPOINTED", ProcessState::kCheckpointed)
        .value("FAILED", ProcessState::kFailed);
    module.def("can_checkpoint", &can_checkpoint,
               "Whether the open driver has CUDA's calls for process checkpoints: 570 or newer.");
    module.def("process_state", &process_state, py::arg("pid"), NoGil());
    module.def("lock_process", &lock_process, py::arg("pid"), py::arg("timeout_s"), NoGil(),
               "Block the further driver calls of another process. CUDA_ERROR_NOT_READY after the timeout: it still\n"
               "runs.");
    module.def("checkpoint_process", &checkpoint_process, py::arg("pid"), NoGil(),
               "Take the memory of a locked process off its GPUs.");
    module.def("restore_process", &restore_process, py::arg("pid"), NoGil(),
               "Give a checkpointed process its GPU memory back; it stays locked.");
    module.def("unlock_process", &unlock_process, py::arg("pid"), NoGil(), "Let a locked process go on.");
}

void bind_devices(py::module_& module) {
    py::class_<DeviceInfo>(module, "DeviceInfo")
        .def_readonly("name", &DeviceInfo::name)
        .def_readonly("pci_bus_id", &DeviceInfo::pci_bus_id)
        .def_readonly("uuid", &DeviceInfo::uuid)
        .def_readonly("total_bytes", &DeviceInfo::total_bytes)
        .def_readonly("capability_major", &DeviceInfo::capability_major)
        .def_readonly("capability_minor", &DeviceInfo::capability_minor)
        .def_readonly("numa_node", &DeviceInfo::numa)
        .def_readonly("virtual_memory", &DeviceInfo::virtual_memory)
        .def_readonly("posix_fd", &DeviceInfo::posix_fd)
        .def_readonly("fabric", &DeviceInfo::fabric)
        .def_readonly("gpu_direct_rdma", &DeviceInfo::gpu_direct_rdma)
        .def_readonly("host_pointers", &DeviceInfo::host_pointers)
        .def_readonly("integrated", &DeviceInfo::integrated);
}

void bind_segment(py::module_& module) {
    py::enum_<BackupPlan>(module, "BackupPlan")
        .value("BY_LEVEL", BackupPlan::kByLevel)
        .value("ALWAYS", BackupPlan::kAlways)
        .value("NEVER", BackupPlan::kNever);
    py::class_<Segment, SegmentPtr> segment(module, "Segment");
    py::enum_<Segment::Sleep>(segment, "Sleep")
        .value("AWAKE", Segment::Sleep::kAwake)
        .value("BACKED_UP", Segment::Sleep::kBackedUp)
        .value("DROPPED", Segment::Sleep::kDropped);
    segment.def_readonly("id", &Segment::id)
        .def_readonly("tag", &Segment::tag)
        .def_readonly("backup", &Segment::backup)
        .def_property_readonly("sleep", [](const Segment& self) { return self.sleep.load(); })
        .def_property_readonly("freed", [](const Segment& self) { return self.freed.load(); })
        .def(
            "note_backup", [](Segment& self) { SegmentTable::get().note_backup(self); },
            "It is about to get a backup in host memory.")
        .def_property_readonly("keeps_bytes", [](const Segment& self) { return self.keeps_bytes.load(); })
        .def_property_readonly("address", [](const Segment& self) { return self.mapping.address(); })
        .def_property_readonly("bytes", [](const Segment& self) { return self.mapping.bytes(); })
        .def_property_readonly("device", [](const Segment& self) { return self.mapping.device(); })
        .def_property_readonly("has_memory", [](const Segment& self) { return self.mapping.has_memory(); })
        .def_property_readonly("keeps_memory", [](const Segment& self) { return self.keeps_memory(); })
        .def("map", &Segment::map, NoGil(), "Map physical memory under the address again; the segment must be held.");
}

void bind_segment_table(py::module_& module) {
    module.def("segments", [] { return SegmentTable::get().segments(); }, NoGil(), "Handed out, oldest first.");
    module.def(
        "segments_in",
        [](std::optional<bool> own_plan, const std::optional<std::set<std::string>>& tags) {
            return SegmentTable::get().segments([&](const Segment& segment) {
                return (!own_plan || (segment.backup != BackupPlan::kByLevel) == *own_plan) &&
                       (!tags || tags->count(segment.tag));
            });
        },
        py::arg("own_plan"), py::arg("tags"), NoGil(),
        "Those with one of these tags (None: any), and with a plan of their own or without (None: either). Python\n"
        "would take as long for a thousand others as a small operation does for all else.");
    module.def(
        "bytes_with_memory",
        [](const std::set<int>& devices) {
            size_t bytes = 0;
            for (const SegmentPtr& segment : SegmentTable::get().segments())
                if (segment->mapping.has_memory() && devices.count(segment->mapping.device()))
                    bytes += segment->mapping.bytes();
            return bytes;
        },
        py::arg("devices"), NoGil(), "Of all segments on these devices.");
    py::class_<Allocation>(module, "Allocation")
        // No factory: pybind11 registers what one returns before NoGil() ends.
        .def(py::init<size_t, std::string, int, BackupPlan>(), py::arg("bytes"), py::arg("tag"), py::arg("device"),
             py::arg("backup") = BackupPlan::kByLevel, NoGil())
        .def_property_readonly("handed_out", &Allocation::hand_out,
                               "The address, which from then on is the caller's to free. Not a call, because Python\n"
                               "handles signals after calls.");
    module.def(
        "take_freed", [] { return SegmentTable::get().take_freed(); },
        "The ids of segments with a backup that were freed since the last call.");
    module.def("has_freed", [] { return SegmentTable::get().has_freed(); }, "Whether `take_freed` would find any.");
    module.def("free", [](CUdeviceptr address) { SegmentTable::get().free(address); }, py::arg("address"), NoGil());
    py::class_<HeldSegments>(module, "HeldSegments")
        .def(py::init<std::vector<SegmentPtr>>(), py::arg("segments"), NoGil())
        .def("__enter__", &HeldSegments::segments)
        .def("__exit__", [](HeldSegments& self, const py::args&) {
            const WithoutInterpreter unlocked;
            self.release();
        });
    module.def(
        "put_to_sleep",
        [](const std::vector<SegmentPtr>& backed_up, const std::vector<SegmentPtr>& dropped,
           const py::function& last_check) {
            const WithoutInterpreter unlocked;
            return SegmentTable::get().put_to_sleep(backed_up, dropped, [&last_check] {
                const py::gil_scoped_acquire gil;
                last_check();
            });
        },
        py::arg("backed_up"), py::arg("dropped"), py::arg("last_check"),
        "All or none; returns the bytes that were released. `last_check` is called when all are detached: what it\n"
        "raises undoes that.");
    module.def(
        "begin_wake", [](const std::vector<SegmentPtr>& all) { SegmentTable::get().begin_wake(all); }, NoGil(),
        "Release memory of these, which sleep, that another process may still write to.");
    module.def("finish_wake", [](const std::vector<SegmentPtr>& all) { SegmentTable::get().finish_wake(all); });
    module.def("undo_wake", [](const std::vector<SegmentPtr>& all) { SegmentTable::get().undo_wake(all); }, NoGil());
    module.def("forget_backups", [](const std::vector<SegmentPtr>& all) { SegmentTable::get().forget_backups(all); });
    module.def(
        "reclaim", [] { return SegmentTable::get().reclaim() + reclaim_host_memory(); }, NoGil(),
        "Retry what the driver refused to free earlier; 0 if nothing is left.");
    module.def(
        "on_free", [](const py::object& callback) { on_free(callback.ptr()); }, py::arg("callback").none(true),
        "Call `callback` on the main thread, soon, after the free hook gave back a segment that had a backup, or\n"
        "whose memory the driver refused to take; None stops that.");
}

void bind_thread_state(py::module_& module) {
    py::class_<PoolScope>(module, "PoolScope", "A pool that this thread is in until it is left, or freed.")
        .def(py::init([](std::string tag, BackupPlan backup, uintptr_t task) {
                 return std::make_unique<PoolScope>(Pool{std::move(tag), backup}, task);
             }),
             py::arg("tag"), py::arg("backup") = BackupPlan::kByLevel, py::arg("task") = 0)
        .def("leave", &PoolScope::leave)
        .def("__enter__", [](PoolScope&) {})
        .def("__exit__", [](PoolScope& self, const py::args&) { self.leave(); });
    module.def("thread_tag", [] { return pool_of_thread().tag; });
    module.def("thread_backup", [] { return pool_of_thread().backup; });
    module.def(
        "set_process_pool",
        [](std::string tag, BackupPlan backup, const std::string& driver_path) {
            set_process_pool({std::move(tag), backup}, driver_path);
        },
        py::arg("tag"), py::arg("backup"), py::arg("driver_path"),
        "What allocations of threads get that have entered nothing.");
    module.def(
        "set_region_margin", [](size_t bytes) { SegmentTable::get().set_region_margin(bytes); }, py::arg("bytes"),
        "Refuse memory with a plan of its own where less than this would stay free on its device.");
    using CurrentContext = Entered<SavedContext>;
    py::class_<CurrentContext>(module, "CurrentContext",
                               "Restore the thread's current CUDA context, whatever PyTorch does inside.")
        .def(py::init<>())
        .def("__enter__", &CurrentContext::enter)
        .def("__exit__", [](CurrentContext& self, const py::args&) { self.leave(); });
    py::class_<ScopeOfDriverCalls>(
        module, "DriverCalls",
        "Driver calls of the thread, also PyTorch's: they are not suspended meanwhile. `with` gives\n"
        "whether they are allowed.")
        .def(py::init<bool>(), py::arg("is_lease") = false)
        .def("__enter__", &ScopeOfDriverCalls::enter)
        .def("__exit__", [](ScopeOfDriverCalls& self, const py::args&) { self.leave(); });
    using RelaxedCapture = Entered<RelaxedCaptureScope>;
    py::class_<RelaxedCapture>(module, "RelaxedCapture",
                               "Lets the thread work during other threads' graph captures, for a scope.")
        .def(py::init<>())
        .def("__enter__", &RelaxedCapture::enter)
        .def("__exit__", [](RelaxedCapture& self, const py::args&) { self.leave(); });
}

void bind_memory(py::module_& module) {
    py::class_<HostBlock, std::shared_ptr<HostBlock>>(module, "HostBlock", py::buffer_protocol())
        .def(py::init<size_t, int>(), py::arg("bytes"), py::arg("numa_node"))
        .def_static("shared", &HostBlock::shared, py::arg("bytes"), py::arg("numa_node"),
                    py::arg("reserved_huge_pages") = false,
                    "Memory that other processes may map too, by `fd`: a memfd that can neither shrink nor grow.")
        .def_static("table", &HostBlock::table, py::arg("bytes"), py::arg("device"), py::arg("numa_node"), NoGil(),
                    "Memory for a table of one operation, which may be pinned already by the one before.")
        .def_static("mapped", &HostBlock::mapped, py::arg("fd"), py::arg("bytes"), py::arg("writable"),
                    "The memory of a `shared` block of another process. `fd` may be closed afterwards.")
        .def("prefault", &HostBlock::prefault, py::arg("offset"), py::arg("bytes"), NoGil())
        .def("pin", &HostBlock::pin, py::arg("device"), NoGil())
        .def("unpin", &HostBlock::unpin, NoGil(), "The bytes stay. False if the driver refuses.")
        .def("close", &HostBlock::close, NoGil())
        .def_property_readonly("bytes", &HostBlock::bytes)
        .def_property_readonly("pinned", &HostBlock::pinned)
        .def_property_readonly("prefault_begun_bytes", &HostBlock::prefault_begun_bytes)
        .def_property_readonly("prefaulted_bytes", &HostBlock::prefaulted_bytes)
        .def_property_readonly("pinned_device", &HostBlock::pinned_device, "-1: it is not pinned.")
        .def_property_readonly("writable", &HostBlock::writable)
        .def_property_readonly("fd", &HostBlock::fd,
                               "The descriptor of an open `shared` block, which keeps owning it; else -1.")
        .def_property_readonly("address",
                               [](const HostBlock& self) { return reinterpret_cast<uintptr_t>(self.data()); })
        .def_buffer([](HostBlock& self) {
            return py::buffer_info(self.data(), 1, py::format_descriptor<uint8_t>::format(),
                                   static_cast<py::ssize_t>(self.bytes()), !self.writable());
        });
    module.def(
        "release_idle",
        [](int device) {
            release_idle_streams(device);
            release_idle_tables(device);
        },
        py::arg("device"), NoGil(), "Let go of the streams and tables that are kept for the next operations.");
    py::class_<Scratch>(module, "Scratch")
        .def(py::init<int, size_t, const std::vector<int>&>(), py::arg("device"), py::arg("bytes"),
             py::arg("peers") = std::vector<int>{}, NoGil())
        .def("close", &Scratch::close, NoGil())
        .def_property_readonly("address", &Scratch::address)
        .def_property_readonly("bytes", &Scratch::bytes);
}

void bind_shared_memory(py::module_& module) {
    module.def(
        "export_memory",
        [](CUdeviceptr address) {
            const ExportedMemory memory = export_memory(address);
            return std::make_tuple(memory.fd, memory.base, memory.bytes);
        },
        py::arg("address"), NoGil(),
        "(fd, base, bytes) of the segment or scratch memory that `address` lies in; the caller closes the descriptor.");
    py::class_<Loan>(module, "Loan",
                     "Memory that another process has; open until it is ended, whatever becomes of this object.")
        .def("end", &Loan::end, "It was given back, or that process is gone.");
    module.def(
        "lend_memory",
        [](CUdeviceptr address, bool filled) {
            const WithoutInterpreter unlocked;
            return lend_memory(address, filled);
        },
        py::arg("address"), py::arg("filled"),
        "The segment or scratch memory that `address` lies in is about to be given to another process, which fills it\n"
        "or only reads it.");
    py::class_<ImportedMemory>(module, "ImportedMemory", "What another process exported, mapped here.")
        .def(py::init<int, int, size_t>(), py::arg("fd"), py::arg("device"), py::arg("bytes"), NoGil())
        .def("close", &ImportedMemory::close, NoGil())
        .def_property_readonly("address", &ImportedMemory::address)
        .def_property_readonly("bytes", &ImportedMemory::bytes)
        .def_property_readonly("device", &ImportedMemory::device);
}

// Of an array of 64-bit integers, of shape (rows, 3), each row after the one before.
Rows rows_of(const py::buffer_info& info) {
    if (info.ndim != 2 || info.shape[1] != 3 || info.itemsize != 8 || info.strides[1] != 8 || info.strides[0] != 24)
        throw py::value_error("expected an array of 64-bit integers with three in each row, all contiguous");
    return {static_cast<const std::array<uint64_t, 3>*>(info.ptr), static_cast<size_t>(info.shape[0])};
}

void bind_copies(py::module_& module) {
    module.def("load_copy_kernel", &load_copy_kernel, py::arg("device"), NoGil(),
               "So that the first copy by a kernel does not wait for it.");
    module.def("load_digest_kernel", &load_digest_kernel, py::arg("device"), NoGil(),
               "As `load_copy_kernel`, for digests.");
    py::class_<CopyStream, std::shared_ptr<CopyStream>>(module, "CopyStream")
        .def(py::init<int>(), py::arg("device"), NoGil())
        .def("to_host", &CopyStream::to_host, py::arg("block"), py::arg("offset"), py::arg("address"), py::arg("bytes"),
             NoGil())
        .def("to_device", &CopyStream::to_device, py::arg("address"), py::arg("block"), py::arg("offset"),
             py::arg("bytes"), NoGil())
        .def("within_devices", &CopyStream::within_devices, py::arg("to"), py::arg("from_"), py::arg("bytes"), NoGil())
        .def("follow", &CopyStream::follow, py::arg("other"), NoGil())
        .def("to_device_by_kernel", &CopyStream::to_device_by_kernel, py::arg("address"), py::arg("block"),
             py::arg("offset"), py::arg("bytes"), py::arg("blocks") = kCopyBlocks, NoGil())
        .def(
            "copy_pieces",
            [](CopyStream& self, const HostBlock& table, size_t begin, const HostBlock& block, const py::buffer& pieces,
               bool to_host) {
                const py::buffer_info info = pieces.request();
                const Rows rows = rows_of(info);
                const WithoutInterpreter unlocked;
                self.copy_pieces(table, begin, block, rows, to_host);
            },
            py::arg("table"), py::arg("begin"), py::arg("block"), py::arg("pieces"), py::arg("to_host"))
        .def(
            "digest",
            [](CopyStream& self, const HostBlock& table, size_t begin, const py::buffer& contents) {
                const py::buffer_info info = contents.request();
                const Rows rows = rows_of(info);
                const WithoutInterpreter unlocked;
                return self.digest(table, begin, rows);
            },
            py::arg("table"), py::arg("begin"), py::arg("contents"))
        .def("fill", &CopyStream::fill, py::arg("address"), py::arg("byte"), py::arg("bytes"), NoGil())
        .def("synchronize", &CopyStream::synchronize, NoGil())
        .def(
            "__enter__", [](CopyStream& self) -> CopyStream& { return self; }, py::return_value_policy::reference)
        .def("__exit__",
             [](CopyStream& self, const py::args&) {
                 const WithoutInterpreter unlocked;
                 self.close();
             })
        .def_property_readonly("device", &CopyStream::device)
        .def_property_readonly("handle",
                               [](const CopyStream& self) { return reinterpret_cast<uintptr_t>(self.handle()); });
}

void bind_operations(py::module_& module) {
    module.attr("OperationStopped") = py::handle(operation_stopped());
    module.def("stop_if_asked", &stop_if_asked, NoGil(),
               "Called again and again while an operation waits for others: its caller may run signal handlers then,\n"
               "and if one raises this does, too. Elsewhere it runs them itself.");
    py::class_<LockGuard>(module, "LockGuard")
        .def("__enter__", [](LockGuard& self) { return static_cast<bool>(self); })
        .def("__exit__", [](LockGuard& self, const py::args&) { self.release(); });
    py::class_<OperationLock, std::shared_ptr<OperationLock>>(module, "OperationLock")
        .def(py::init<>())
        .def(
            "hold",
            [](const std::shared_ptr<OperationLock>& self, bool wait) {
                return std::make_unique<LockGuard>(self, wait);
            },
            py::arg("wait") = true, "Holds the lock; `with` gives whether it could be taken.")
        .def(
            "run",
            [](OperationLock& self, const py::object& work) {
                return py::reinterpret_steal<py::object>(self.run(work.ptr()));
            },
            py::arg("work"),
            "Call `work` on a thread of its own, so that signals do not disturb it; what it returns or raises, or "
            "what\n"
            "a signal handler raises while it waits for others.");
    py::class_<Worker, std::shared_ptr<Worker>>(module, "Worker", "A thread that works until it is asked to stop.")
        .def(py::init([](std::string name) { return std::make_shared<Worker>(std::move(name)); }), py::arg("name"))
        .def(
            "start", [](Worker& self, const py::object& work) { self.start(work.ptr()); }, py::arg("work"),
            "Call `work` on the thread, once.")
        .def("ask_to_stop", &Worker::ask_to_stop)
        .def("pause", &Worker::pause, py::arg("seconds"),
             "Wait until it is asked to stop, at most this long; returns whether it was.")
        .def("wait", &Worker::wait, py::arg("timeout_s") = py::none(),
             "Wait until it has ended, at most this long; returns whether it has.")
        .def("stop", &Worker::stop, "Ask it to stop and wait until it has; on its own thread only ask.")
        .def_property_readonly("running", &Worker::running)
        .def_property_readonly("asked_to_stop", &Worker::asked_to_stop);
}

void bind_threads(py::module_& module) {
    module.def("allow_threads", &allow_threads, py::arg("count"),
               "For tests: only this many more threads can be started; a negative number lifts the limit.");
}

// In production tasks are C++ only.
ThreadPoolTask python_task(py::object work) {
    const std::shared_ptr<py::object> shared(new py::object(std::move(work)), [](py::object* dropped) {
        py::gil_scoped_acquire gil;
        delete dropped;
    });
    return {[shared] {
        py::gil_scoped_acquire gil;
        (*shared)();
    }};
}

// Converts a dictionary {key: [ThreadPoolTask, ...]}.
ThreadPool::Tasks tasks_of(const py::dict& tasks) {
    ThreadPool::Tasks result;
    for (const auto& [key, mine] : tasks) {
        result.emplace_back(py::cast<uint64_t>(key), std::vector<ThreadPool::Task>());
        for (const auto& task : mine) result.back().second.push_back(py::cast<const ThreadPoolTask&>(task).task);
    }
    return result;
}

void bind_ahead(py::module_& module) {
    py::class_<ThreadPoolTask>(module, "Task",
                               "A task for a thread of `ThreadPool`; only tests make one from a Python function.")
        .def(py::init(&python_task), py::arg("work"));
    module.def("map_task", &map_task, py::arg("segment"), "Map physical memory under it; the segment must be held.");
    module.def("prefault_task", &prefault_task, py::arg("block"), py::arg("offset"), py::arg("bytes"));
    py::class_<ThreadPool>(module, "ThreadPool",
                           "Threads that run tasks in order, each under the key of what it is for; a context manager.")
        .def(py::init([](int threads, const py::dict& tasks) {
                 return std::make_unique<ThreadPool>(threads, tasks_of(tasks));
             }),
             py::arg("threads"), py::arg("tasks") = py::dict())
        .def("start", &ThreadPool::start, NoGil(), "Begin the tasks that it was made with.")
        .def(
            "add",
            [](ThreadPool& self, const py::dict& tasks) {
                ThreadPool::Tasks more = tasks_of(tasks);
                const WithoutInterpreter unlocked;
                self.add(std::move(more));
            },
            py::arg("tasks"), "Append tasks; they begin at once.")
        .def("wait", &ThreadPool::wait, py::arg("key"), NoGil(),
             "Return when the tasks of `key` have run, raise what one of them raised. Waiting again does nothing.")
        .def("stop", &ThreadPool::stop, NoGil(),
             "Wait for running tasks, drop those that have not begun. Stopping again does nothing.")
        .def(
            "__enter__", [](ThreadPool& self) -> ThreadPool& { return self; }, py::return_value_policy::reference)
        .def("__exit__", [](ThreadPool& self, const py::args&) {
            const WithoutInterpreter unlocked;
            self.stop();
        });
}

// The compiler, and the headers of the driver.
std::string built_with() {
#ifdef __clang__
    const std::string compiler = __VERSION__;
#else
    const std::string compiler = "GCC " __VERSION__;
#endif
    return compiler + ", CUDA " + version_text(CUDA_VERSION);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
    module.doc() = "Segments, host memory and copies: what cumem_sleep.allocator orders. Not a public interface.";
    errors();
    py::register_exception_translator(&translate_error);
    module.attr("CHECKS_INVARIANTS") = kChecksInvariants;
    module.attr("BUILT_WITH") = built_with();
    bind_driver(module);
    bind_checkpoint(module);
    bind_devices(module);
    bind_segment(module);
    bind_segment_table(module);
    bind_thread_state(module);
    bind_memory(module);
    bind_shared_memory(module);
    bind_copies(module);
    bind_operations(module);
    bind_threads(module);
    bind_ahead(module);
}
