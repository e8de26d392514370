// Stream capture, as far as a layer beside it can disturb it: work is counted, not kept, and graphs cannot be launched.
//
// The rules are those of cuThreadExchangeStreamCaptureMode in CUDA's documentation. Not checked: that streams which
// joined a capture are joined back before it ends.
#include "captures.h"

#include <algorithm>

#include "streams.h"

using namespace cumem_sim;

namespace {

bool known_mode(const CUstreamCaptureMode& passed) {
    const int mode = number_of(passed);
    return mode == CU_STREAM_CAPTURE_MODE_GLOBAL || mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL ||
           mode == CU_STREAM_CAPTURE_MODE_RELAXED;
}

bool forbids_unsafe_calls_here(const Capture& capture) {
    const CUstreamCaptureMode thread_mode = this_thread().capture_mode;
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return false;
    if (capture.thread == std::this_thread::get_id()) return capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    return thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

// Invalidates every capture that `stands_in_the_way`; fails the call if there is one.
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

CUresult CUDAAPI cuStreamBeginCapture(CUstream hStream, CUstreamCaptureMode mode) {
    return driver_call("cuStreamBeginCapture", Needs::kContext, [&](Call& call) {
        require(known_mode(mode), CUDA_ERROR_INVALID_VALUE);
        const auto stream = find_stream(call, hStream);
        require(stream != call.context->legacy, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        require(&stream->context == call.context, CUDA_ERROR_INVALID_HANDLE);
        refuse_after_fault(*call.context);
        require(!stream->capture, CUDA_ERROR_ILLEGAL_STATE);
        auto capture = std::make_shared<Capture>();
        capture->mode = mode;
        capture->thread = std::this_thread::get_id();
        capture->origin = stream->handle;
        capture->streams.push_back(stream);
        stream->capture = capture;
        call.sim.captures.push_back(std::move(capture));
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuStreamEndCapture(CUstream hStream, CUgraph* phGraph) {
    return driver_call("cuStreamEndCapture", Needs::kContext, [&](Call& call) {
        require(phGraph, CUDA_ERROR_INVALID_VALUE);
        *phGraph = nullptr;
        const auto capture = find_stream(call, hStream)->capture;
        require(capture != nullptr, CUDA_ERROR_ILLEGAL_STATE);
        const bool ends_here =
            capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED || capture->thread == std::this_thread::get_id();
        require(ends_here, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        require(capture->origin == hStream, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        end_capture(call.sim, *capture);
        require(!capture->invalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        *phGraph = reinterpret_cast<CUgraph>(call.sim.new_handle());
        call.sim.graphs.emplace(*phGraph, Graph{capture->nodes});
        return CUDA_SUCCESS;
    });
}

// Never invalidates anything: it is how a layer finds out that it must not touch a stream.
CUresult CUDAAPI cuStreamIsCapturing(CUstream hStream, CUstreamCaptureStatus* captureStatus) {
    return driver_call("cuStreamIsCapturing", Needs::kContext, [&](Call& call) {
        require(captureStatus, CUDA_ERROR_INVALID_VALUE);
        const auto stream = find_stream(call, hStream);
        const bool legacy = stream == call.context->legacy;
        require(!legacy || !legacy_stream_is_blocked(call.sim, *call.context), CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        const Capture* capture = stream->capture.get();
        *captureStatus = !capture               ? CU_STREAM_CAPTURE_STATUS_NONE
                         : capture->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                                : CU_STREAM_CAPTURE_STATUS_ACTIVE;
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    return driver_call("cuThreadExchangeStreamCaptureMode", Needs::kInit, [&](Call&) {
        require(mode && known_mode(*mode), CUDA_ERROR_INVALID_VALUE);
        std::swap(*mode, this_thread().capture_mode);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuGraphDestroy(CUgraph hGraph) {
    return driver_call("cuGraphDestroy", Needs::kInit, [&](Call& call) {
        require(call.sim.graphs.erase(hGraph) == 1, CUDA_ERROR_INVALID_VALUE);
        return CUDA_SUCCESS;
    });
}
