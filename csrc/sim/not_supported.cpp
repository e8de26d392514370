// Calls that this driver does not implement but that other libraries in the process are linked against: the loader
// finds the symbols, and calling them fails. vLLM's extensions (0.11 to 0.33) refer to both: the first for its custom
// all-reduce, the second for kernels, which cannot run here anyway.
#include "driver_call.h"
#include "simulation.h"

using namespace cumem_sim;

CUresult CUDAAPI cuPointerGetAttribute(void*, CUpointer_attribute, CUdeviceptr) {
    return driver_call("cuPointerGetAttribute", Needs::kInit, [](Call&) { return CUDA_ERROR_NOT_SUPPORTED; });
}

CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                        const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                        CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    return driver_call("cuTensorMapEncodeTiled", Needs::kInit, [](Call&) { return CUDA_ERROR_NOT_SUPPORTED; });
}
