// Streams: each has a thread that runs the enqueued work in order. Used by copies, captures and contexts.
#pragma once

#include <memory>

#include "driver_call.h"
#include "simulation.h"

namespace cumem_sim {

// Null and CU_STREAM_LEGACY are the current context's legacy stream. CU_STREAM_PER_THREAD is not supported.
std::shared_ptr<Stream> find_stream(Call& call, CUstream handle);

// The same, for a call that enqueues: the stream must belong to the current context, which must not have failed.
std::shared_ptr<Stream> stream_for_work(Call& call, CUstream handle);

void refuse_after_fault(const Context& context);

// Runs the work on the stream's thread, or records it if the stream is capturing.
void enqueue(Call& call, const std::shared_ptr<Stream>& stream, Work work);

// Whether everything enqueued has run.
bool is_idle(const Stream& stream);
bool is_idle(const Context& context);

// Waits until everything enqueued so far has run, then reports what went wrong in it.
void synchronize(Call& call, const Stream& stream);
void synchronize(Call& call, const Context& context);

// The handle is invalid at once; the thread ends after the work that is enqueued.
void destroy_stream(Simulation& sim, const std::shared_ptr<Stream>& stream);

std::shared_ptr<Stream> new_legacy_stream(Simulation& sim, Context& context);

}  // namespace cumem_sim
