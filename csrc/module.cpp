// Python bindings. Every function that calls the driver, or may wait, runs without the interpreter lock.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <thread>
#include <utility>

#include "allocator.h"
#include "driver.h"
#include "host_arena.h"
#include "interpreter.h"
#include "operation.h"
#include "scratch.h"
#include "transfer.h"
#include "vmm.h"

namespace py = pybind11;
using namespace cumem_sleep;

namespace {

using NoGil = py::call_guard<WithoutInterpreter>;

struct DeviceInfo {
    std::string name, pci_bus_id;
    size_t total_bytes = 0, granularity_bytes = 0;
    int capability_major = 0, capability_minor = 0, numa = -1;
    bool virtual_memory = false, posix_fd = false, fabric = false, gpu_direct_rdma = false;
    bool host_pointers = false;  // kernels reach registered host memory under its host address
};

DeviceInfo device_info(int device) {
    check_device(device);
    const Driver& driver = Driver::get();
    const auto attribute = [&](CUdevice_attribute which) {
        int value = 0;
        driver.device_get_attribute(&value, which, device);
        return value;
    };
    DeviceInfo info;
    char text[128] = "";
    driver.device_get_name(text, sizeof text, device);
    info.name = text;
    driver.device_get_pci_bus_id(text, sizeof text, device);
    info.pci_bus_id = text;
    info.numa = numa_node(info.pci_bus_id);
    driver.device_total_mem(&info.total_bytes, device);
    info.capability_major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    info.capability_minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    info.host_pointers = attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
    info.virtual_memory = attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
    if (!info.virtual_memory) return info;
    info.granularity_bytes = granularity(device);
    const HandleSupport support = handle_support(device);
    info.posix_fd = support.handle_types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    info.fabric = support.handle_types & CU_MEM_HANDLE_TYPE_FABRIC;
    info.gpu_direct_rdma = support.gpu_direct_rdma;
    return info;
}

// Holds segments for one operation. An object rather than two calls, so that an interrupt between them loses no unpin.
class Pinned {
  public:
    explicit Pinned(const std::vector<SegmentPtr>& segments) : segments_(SegmentTable::get().pin(segments)) {}
    ~Pinned() { release(); }
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;

    const std::vector<SegmentPtr>& segments() const { return segments_; }

    void release() noexcept {
        SegmentTable::get().unpin(segments_);
        segments_.clear();
    }

  private:
    std::vector<SegmentPtr> segments_;
};

// The thread's current CUDA context stays what it was, whatever PyTorch does inside.
struct CurrentContext {
    std::unique_ptr<SavedContext> saved;
};

// Lets the thread work beside graph captures of other threads for a scope.
struct RelaxedCapture {
    std::unique_ptr<RelaxedCaptureScope> scope;
};

// Memory on its way to a caller: freed with this object unless it was handed out, so that an interrupt in between loses
// no address.
class Allocation {
  public:
    Allocation(size_t bytes, const std::string& tag, int device)
        : address_(SegmentTable::get().allocate(bytes, device, tag)->mapping.address()) {}
    ~Allocation() {
        if (!address_) return;
        const WithoutInterpreter unlocked;
        cumem_sleep_free(reinterpret_cast<void*>(address_), 0, 0, nullptr);
    }
    Allocation(const Allocation&) = delete;
    Allocation& operator=(const Allocation&) = delete;

    CUdeviceptr hand_out() { return std::exchange(address_, 0); }

  private:
    CUdeviceptr address_;
};

// The tag of the thread for a scope; only that thread gets its old tag back.
class ThreadTag {
  public:
    explicit ThreadTag(const std::string& tag)
        : thread_(std::this_thread::get_id()), outer_(exchange_thread_tag(tag)) {}
    ~ThreadTag() { restore(); }
    ThreadTag(const ThreadTag&) = delete;
    ThreadTag& operator=(const ThreadTag&) = delete;

    void restore() {
        if (std::exchange(active_, false) && thread_ == std::this_thread::get_id()) exchange_thread_tag(outer_);
    }

  private:
    const std::thread::id thread_;
    const std::string outer_;
    bool active_ = true;
};

// The hooks run without the interpreter; what Python does about a freed segment is put off to the main thread, where it
// may come at any place of the program.
std::atomic<bool> notification_pending{false};
PyObject* on_free_callback = nullptr;

int notify_python(void*) {
    notification_pending = false;
    if (!on_free_callback) return 0;
    try {
        call_undisturbed(py::reinterpret_borrow<py::object>(on_free_callback));
    } catch (py::error_already_set& error) {
        error.restore();  // of a signal handler, so it is due here
        return -1;
    }
    return 0;
}

void on_free(py::object callback) {
    Py_XDECREF(on_free_callback);
    on_free_callback = callback.is_none() ? nullptr : callback.release().ptr();
    set_free_listener(on_free_callback ? +[] {
        if (!notification_pending.exchange(true) && Py_AddPendingCall(notify_python, nullptr) != 0)
            notification_pending = false;
    } : nullptr);
}

void raise(const char* type, const py::tuple& arguments) {
    const py::object error_type = errors().attr(type);
    PyErr_SetObject(error_type.ptr(), error_type(*arguments).ptr());
}

void translate(std::exception_ptr pointer) {
    try {
        std::rethrow_exception(pointer);
    } catch (const OutOfDeviceMemory& error) {
        raise("OutOfDeviceMemory",
              py::make_tuple(error.needed_bytes, error.free_bytes, error.device, error.call, error.segment));
    } catch (const DriverError& error) {
        raise("DriverError", py::make_tuple(error.call, error.error, error.detail, error.segment));
    } catch (const HostMemoryError& error) {
        raise("OutOfHostMemory", py::make_tuple(error.bytes, 0, error.call, error.what()));
    } catch (const InvalidState& error) {
        raise("InvalidState", py::make_tuple(error.what()));
    }
}

}  // namespace

PYBIND11_MODULE(_core, module) {
    module.doc() = "Segments, host memory and copies: what cumem_sleep.allocator orders. Not a public interface.";
    py::register_exception_translator(&translate);

    module.def("open_driver", &Driver::open, py::arg("path"), NoGil(),
               "Open libcuda (or a simulated driver) from `path` and initialise it; once per process.");
    module.def("driver_is_open", &Driver::is_open);
    module.def("driver_is_forked", &Driver::is_forked);
    module.def("driver_path", []() -> py::object {
        if (!Driver::is_open() || Driver::is_forked()) return py::none();
        return py::str(Driver::get().path());
    });
    module.def("driver_is_simulated",
               [] { return Driver::is_open() && !Driver::is_forked() && Driver::get().simulated(); });
    module.def("driver_version", [] { return Driver::get().version(); });

    module.def("device_count", &device_count, NoGil());
    module.def("device_info", &device_info, py::arg("device"), NoGil());
    module.def(
        "memory_info",
        [](int device) {
            const MemoryInfo info = memory_info(device);
            return std::make_pair(info.free_bytes, info.total_bytes);
        },
        py::arg("device"), NoGil(), "(free, total) bytes of the device. Creates its primary context if need be.");
    module.def("synchronize", &synchronize, py::arg("device"), NoGil());
    module.def("release_waiter", &release_waiter, py::arg("device"), NoGil(),
               "Give back the page that makes waiting cheap, if it was taken; waits for the device.");
    module.def("numa_node", &numa_node, py::arg("pci_bus_id"));

    py::class_<DeviceInfo>(module, "DeviceInfo")
        .def_readonly("name", &DeviceInfo::name)
        .def_readonly("pci_bus_id", &DeviceInfo::pci_bus_id)
        .def_readonly("total_bytes", &DeviceInfo::total_bytes)
        .def_readonly("granularity_bytes", &DeviceInfo::granularity_bytes)
        .def_readonly("capability_major", &DeviceInfo::capability_major)
        .def_readonly("capability_minor", &DeviceInfo::capability_minor)
        .def_readonly("numa_node", &DeviceInfo::numa)
        .def_readonly("virtual_memory", &DeviceInfo::virtual_memory)
        .def_readonly("posix_fd", &DeviceInfo::posix_fd)
        .def_readonly("fabric", &DeviceInfo::fabric)
        .def_readonly("gpu_direct_rdma", &DeviceInfo::gpu_direct_rdma)
        .def_readonly("host_pointers", &DeviceInfo::host_pointers);

    py::class_<Segment, SegmentPtr> segment(module, "Segment");
    py::enum_<Segment::Sleep>(segment, "Sleep")
        .value("AWAKE", Segment::Sleep::kAwake)
        .value("BACKED_UP", Segment::Sleep::kBackedUp)
        .value("DROPPED", Segment::Sleep::kDropped);
    segment.def_readonly("id", &Segment::id)
        .def_readonly("tag", &Segment::tag)
        .def_property_readonly("sleep", [](const Segment& self) { return self.sleep.load(); })
        .def_property_readonly("freed", [](const Segment& self) { return self.freed.load(); })
        .def(
            "note_backup", [](Segment& self) { SegmentTable::get().note_backup(self); },
            "Host memory is about to be held for it.")
        .def(
            "lend", [](Segment& self) { self.lent = true; },
            "Its bytes are about to be overwritten: when it is unpinned it is dropped, unless `take_back` came before.")
        .def(
            "take_back", [](Segment& self) { self.lent = false; }, "Its bytes are back.")
        .def_property_readonly("keeps_bytes", [](const Segment& self) { return self.keeps_bytes.load(); })
        .def_property_readonly("address", [](const Segment& self) { return self.mapping.address(); })
        .def_property_readonly("bytes", [](const Segment& self) { return self.mapping.bytes(); })
        .def_property_readonly("device", [](const Segment& self) { return self.mapping.device(); })
        .def_property_readonly("has_memory", [](const Segment& self) { return self.mapping.has_memory(); })
        .def(
            "map",
            [](Segment& self) {
                ContextScope context(self.mapping.device());
                self.mapping.map();
            },
            NoGil(), "Physical memory under the address again; the segment must be pinned.");

    module.def(
        "segments",
        [] {
            if (Driver::is_open()) Driver::get();  // tells a forked child
            return SegmentTable::get().segments();
        },
        NoGil(), "Handed out, oldest first.");
    py::class_<Allocation>(module, "Allocation")
        .def(py::init<size_t, std::string, int>(), py::arg("bytes"), py::arg("tag"), py::arg("device"), NoGil())
        .def_property_readonly("handed_out", &Allocation::hand_out,
                               "The address, which from then on is the caller's to free. Not a call, because Python\n"
                               "handles signals after calls.");
    module.def(
        "take_freed", [] { return SegmentTable::get().take_freed(); },
        "The ids of segments with a backup that were freed since this was asked last.");
    module.def("has_freed", [] { return SegmentTable::get().has_freed(); }, "Whether `take_freed` would find any.");
    module.def("free", [](CUdeviceptr address) { SegmentTable::get().free(address); }, py::arg("address"), NoGil());
    py::class_<Pinned>(module, "Pinned")
        .def(py::init<std::vector<SegmentPtr>>(), py::arg("segments"), NoGil())
        .def("__enter__", &Pinned::segments)
        .def("__exit__", [](Pinned& self, const py::args&) {
            const WithoutInterpreter unlocked;
            self.release();
        });
    module.def(
        "put_to_sleep",
        [](const std::vector<SegmentPtr>& backed_up, const std::vector<SegmentPtr>& dropped) {
            return SegmentTable::get().put_to_sleep(backed_up, dropped, &stop_if_asked);
        },
        py::arg("backed_up"), py::arg("dropped"), NoGil(), "All or none; returns the bytes that were released.");
    module.def("finish_wake", [](const std::vector<SegmentPtr>& all) { SegmentTable::get().finish_wake(all); });
    module.def("undo_wake", [](const std::vector<SegmentPtr>& all) { SegmentTable::get().undo_wake(all); }, NoGil());
    module.def(
        "reclaim", [] { return SegmentTable::get().reclaim() + reclaim_host_memory(); }, NoGil(),
        "Try again what the driver refused to take back earlier; 0 if nothing is held back any more.");

    py::class_<ThreadTag>(module, "ThreadTag")
        .def(py::init<std::string>(), py::arg("tag"))
        .def("__enter__", [](ThreadTag&) {})
        .def("__exit__", [](ThreadTag& self, const py::args&) { self.restore(); });
    bind_operations(module);
    module.def("thread_tag", [] { return thread_tag(); });
    module.def(
        "on_free", &on_free, py::arg("callback").none(true),
        "Call `callback` on the main thread, soon, after the free hook gave back a segment that had a backup, or\n"
        "whose memory the driver refused to take; None stops that.");

    py::class_<CurrentContext>(module, "CurrentContext")
        .def(py::init<>())
        .def("__enter__", [](CurrentContext& self) { self.saved = std::make_unique<SavedContext>(); })
        .def("__exit__", [](CurrentContext& self, const py::args&) { self.saved.reset(); });

    py::class_<RelaxedCapture>(module, "RelaxedCapture")
        .def(py::init<>())
        .def("__enter__", [](RelaxedCapture& self) { self.scope = std::make_unique<RelaxedCaptureScope>(); })
        .def("__exit__", [](RelaxedCapture& self, const py::args&) { self.scope.reset(); });

    py::class_<HostBlock, std::shared_ptr<HostBlock>>(module, "HostBlock", py::buffer_protocol())
        .def(py::init<size_t, int>(), py::arg("bytes"), py::arg("numa_node"))
        .def("touch", &HostBlock::touch, py::arg("offset"), py::arg("bytes"), NoGil())
        .def("pin", &HostBlock::pin, py::arg("device"), NoGil())
        .def("close", &HostBlock::close, NoGil())
        .def_property_readonly("bytes", &HostBlock::bytes)
        .def_property_readonly("pinned", &HostBlock::pinned)
        .def_property_readonly("address",
                               [](const HostBlock& self) { return reinterpret_cast<uintptr_t>(self.data()); })
        .def_buffer([](HostBlock& self) {
            return py::buffer_info(self.data(), 1, py::format_descriptor<uint8_t>::format(),
                                   static_cast<py::ssize_t>(self.bytes()));
        });

    py::class_<Scratch>(module, "Scratch")
        .def(py::init<int, size_t>(), py::arg("device"), py::arg("bytes"), NoGil())
        .def("close", &Scratch::close, NoGil())
        .def_property_readonly("address", &Scratch::address)
        .def_property_readonly("bytes", &Scratch::bytes);

    py::class_<CopyStream, std::shared_ptr<CopyStream>>(module, "CopyStream")
        .def(py::init<int>(), py::arg("device"), NoGil())
        .def(
            "to_host",
            [](CopyStream& self, const HostBlock& block, size_t offset, CUdeviceptr address, size_t bytes) {
                if (offset > block.bytes() || bytes > block.bytes() - offset)
                    throw std::out_of_range("beyond the block");
                self.to_host(block.data() + offset, address, bytes);
            },
            py::arg("block"), py::arg("offset"), py::arg("address"), py::arg("bytes"), NoGil())
        .def(
            "to_device",
            [](CopyStream& self, CUdeviceptr address, const HostBlock& block, size_t offset, size_t bytes) {
                if (offset > block.bytes() || bytes > block.bytes() - offset)
                    throw std::out_of_range("beyond the block");
                self.to_device(address, block.data() + offset, bytes);
            },
            py::arg("address"), py::arg("block"), py::arg("offset"), py::arg("bytes"), NoGil())
        .def("poison", &CopyStream::poison, py::arg("address"), py::arg("bytes"), NoGil())
        .def("zero", &CopyStream::zero, py::arg("address"), py::arg("bytes"), NoGil())
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
