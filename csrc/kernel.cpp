#include "kernel.h"

#include "driver.h"

namespace cumem_sleep {

CUfunction Kernel::on(int device) {
    return loaded_.with(device, [this](Loaded& loaded) {
        if (loaded.function) return loaded.function;
        RelaxedCaptureScope relaxed;  // another thread may capture a graph
        const Driver& driver = Driver::get();
        if (!loaded.module) {
            CUmodule module = nullptr;
            driver.module_load_data(&module, ptx_);
            loaded.module = module;  // kept, whatever comes next: the next try loads no other
        }
        CUfunction function = nullptr;
        driver.module_get_function(&function, loaded.module, name_);
        return loaded.function = function;
    });
}

void Kernel::load(int device) {
    ContextScope context(device);
    on(device);
}

}  // namespace cumem_sleep
