// What a stream capture forbids. A call that it forbids fails, and the capture is invalid from then on.
#pragma once

#include "simulation.h"

namespace cumem_sim {

// For calls that wait for, or ask about, the stream itself.
void refuse_if_capturing(const Stream& stream);

// For calls that wait for everything in a context.
void refuse_if_capturing(const Simulation& sim, const Context& context);

// For any use of the legacy stream, which would have to wait for a blocking stream that captures.
bool legacy_stream_is_blocked(const Simulation& sim, const Context& context);
void refuse_if_legacy_stream_is_blocked(const Simulation& sim, const Context& context);

// For "potentially unsafe" calls: the thread's capture mode (cuThreadExchangeStreamCaptureMode) decides.
void refuse_if_unsafe_for_captures(const Simulation& sim);

// Takes a capture out of the state: its streams run work again.
void end_capture(Simulation& sim, Capture& capture);

}  // namespace cumem_sim
