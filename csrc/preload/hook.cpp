// The library that LD_PRELOAD names where a whole process is a region, or a CUDA graph is captured in one: it takes the
// place of cudaMalloc and cudaFree, and gives what belongs to a region to the allocator's hooks (csrc/allocator.h).
// C code that pauses and resumes by torch_memory_saver's library finds its two functions for that here.
//
// It is loaded into every program that is started with that environment, so it needs nothing but libdl, and until the
// layer says that it serves, it only passes calls on.
#include <dlfcn.h>

#include <atomic>
#include <cstddef>

namespace {

constexpr int kSuccess = 0, kOutOfMemory = 2, kNotInitialized = 3;  // of cudaError_t

struct Layer {
    void* (*malloc)(size_t, int, void*);
    void (*free)(void*, size_t, int, void*);
    bool (*wants)();
    bool (*owns)(void*);
};

std::atomic<const Layer*> serving{nullptr};

using TagCall = void (*)(const char* tag);  // null: all tags
std::atomic<TagCall> pausing{nullptr}, resuming{nullptr};

// The function of this name in the runtime that the program uses; null if it uses none.
template <typename Function>
Function next(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

int current_device() {
    int device = 0;
    if (const auto get = next<int (*)(int*)>("cudaGetDevice")) get(&device);
    return device;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int cudaMalloc(void** address, size_t bytes) {
    const Layer* const layer = serving;
    if (layer && address && bytes > 0 && layer->wants()) {
        void* const allocated = layer->malloc(bytes, current_device(), nullptr);
        if (!allocated) return kOutOfMemory;
        *address = allocated;
        return kSuccess;
    }
    const auto real = next<int (*)(void**, size_t)>("cudaMalloc");
    return real ? real(address, bytes) : kNotInitialized;
}

__attribute__((visibility("default"))) int cudaFree(void* address) {
    const Layer* const layer = serving;
    if (layer && address && layer->owns(address)) {
        layer->free(address, 0, 0, nullptr);
        return kSuccess;
    }
    const auto real = next<int (*)(void*)>("cudaFree");
    return real ? real(address) : kNotInitialized;
}

// Before torch_memory_saver was used in Python there are no regions, so there is nothing to do.
__attribute__((visibility("default"))) void tms_pause(const char* tag) {
    if (const TagCall call = pausing) call(tag);
}

__attribute__((visibility("default"))) void tms_resume(const char* tag) {
    if (const TagCall call = resuming) call(tag);
}

// What these two call from here on; null: nothing.
__attribute__((visibility("default"))) void cumem_sleep_preload_calls(TagCall pause, TagCall resume) {
    pausing = pause;
    resuming = resume;
}

// Called once, by the layer: from here on it is asked.
__attribute__((visibility("default"))) void cumem_sleep_preload_serve(void* (*malloc)(size_t, int, void*),
                                                                      void (*free)(void*, size_t, int, void*),
                                                                      bool (*wants)(), bool (*owns)(void*)) {
    static Layer layer;  // has no destructor: programs free while they exit
    layer = {malloc, free, wants, owns};
    serving = &layer;
}
}
