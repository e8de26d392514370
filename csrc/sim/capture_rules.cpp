// The rules are those of cuThreadExchangeStreamCaptureMode in CUDA's documentation.
#include "capture_rules.h"

#include <algorithm>
#include <thread>

using namespace cumem_sim;

namespace {

bool forbids_unsafe_calls_here(const Capture& capture) {
    const CUstreamCaptureMode thread_mode = this_thread().capture_mode;
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    if (capture.thread == std::this_thread::get_id()) return capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    return thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

// Invalidates every capture that matches `stands_in_the_way`; fails the call if there is one.
template <typename Predicate>
void refuse_if_any(const Simulation& sim, CUresult error, Predicate stands_in_the_way) {
    bool refused = false;
    for (const auto& capture : sim.captures) {
        if (!stands_in_the_way(*capture)) continue;
        capture->invalidated = true;
        refused = true;
    }
    require(!refused, error);
}

bool captures_in(const Capture& capture, const Context& context, bool only_blocking) {
    return std::any_of(capture.streams.begin(), capture.streams.end(), [&](const auto& stream) {
        return &stream->context == &context && (stream->blocking || !only_blocking);
    });
}

}  // namespace

namespace cumem_sim {

void refuse_if_capturing(const Stream& stream) {
    if (!stream.capture) return;
    const bool was_invalid = stream.capture->invalidated;
    stream.capture->invalidated = true;
    throw Refused{was_invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED};
}

void refuse_if_capturing(const Simulation& sim, const Context& context) {
    refuse_if_any(sim, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                  [&](const Capture& capture) { return captures_in(capture, context, false); });
}

bool legacy_stream_is_blocked(const Simulation& sim, const Context& context) {
    return std::any_of(sim.captures.begin(), sim.captures.end(),
                       [&](const auto& capture) { return captures_in(*capture, context, true); });
}

void refuse_if_legacy_stream_is_blocked(const Simulation& sim, const Context& context) {
    refuse_if_any(sim, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
                  [&](const Capture& capture) { return captures_in(capture, context, true); });
}

void refuse_if_unsafe_for_captures(const Simulation& sim) {
    refuse_if_any(sim, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, forbids_unsafe_calls_here);
}

void end_capture(Simulation& sim, Capture& capture) {
    capture.ended = true;
    for (const auto& stream : capture.streams) stream->capture = nullptr;
    capture.streams.clear();
    const auto is_this = [&](const auto& other) { return other.get() == &capture; };
    sim.captures.erase(std::remove_if(sim.captures.begin(), sim.captures.end(), is_this), sim.captures.end());
}

}  // namespace cumem_sim
