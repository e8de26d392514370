// Waiting for the work that runs on a device, where CUDA's own calls for that would invalidate a graph capture.
#pragma once

namespace cumem_sleep {

// Waits for all work that runs on the device. Works during a graph capture, on this thread or another, and leaves it
// intact. The driver has no call for this: those that wait for a context invalidate captures (cuCtxSynchronize,
// cuCtxRecordEvent), and this layer does not know which streams exist. But cuMemFree waits for all running work of its
// context, and a thread in relaxed mode may call it during a capture; cuMemUnmap and cuMemRelease wait for nothing.
// Measured with driver 580 for kernels on several streams, copies both ways, graph replays and host functions.
void wait_for_running_work(int device);

// The driver has refused every wait for some work of this layer, which may run still. Memory that it uses is taken away
// after `wait_for_work_left`, which waits until then, does nothing if there is none, and throws DriverError as long as
// the driver refuses.
void note_work_left(int device) noexcept;
void wait_for_work_left(int device);

// Frees the device page that makes waiting cheap; freeing it waits, too. The next wait allocates it again.
void release_waiter(int device) noexcept;

}  // namespace cumem_sleep
