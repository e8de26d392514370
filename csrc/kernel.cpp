#include "kernel.h"

#include "driver.h"

namespace cumem_sleep {

CUfunction Kernel::on(int device) {
    const std::lock_guard<std::mutex> guard(mutex_);
    CUfunction& function = loaded_[device];
    if (!function) {
        RelaxedCaptureScope relaxed;  // another thread may capture a graph
        const Driver& driver = Driver::get();
        CUmodule module = nullptr;
        driver.module_load_data(&module, ptx_);
        driver.module_get_function(&function, module, name_);
    }
    return function;
}

void Kernel::load(int device) {
    ContextScope context(device);
    on(device);
}

}  // namespace cumem_sleep
