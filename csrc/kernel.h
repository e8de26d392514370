// `Kernel`: a kernel in PTX, which the driver compiles for its GPU. So nobody who builds this needs a CUDA compiler,
// and no process needs PyTorch or Triton to run it.
#pragma once

#include <cuda.h>

#include "per_device.h"

namespace cumem_sleep {

class Kernel {
  public:
    // `name`: of its entry in `ptx`. Both stay where they are.
    Kernel(const char* ptx, const char* name) : ptx_(ptx), name_(name) {}
    Kernel(const Kernel&) = delete;
    Kernel& operator=(const Kernel&) = delete;

    // The function on this device, whose context is current. The driver compiles it when it first loads it, for 0.1 s,
    // and keeps that in a cache of its own. Throws DriverError.
    CUfunction on(int device);
    // The same ahead of time, in any context.
    void load(int device);

  private:
    const char* const ptx_;
    const char* const name_;
    struct Loaded {
        CUmodule module = nullptr;
        CUfunction function = nullptr;
    };
    PerDevice<Loaded> loaded_;
};

}  // namespace cumem_sleep
