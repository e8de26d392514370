// Stream capture, as far as this project can disturb it: work is counted, not kept, and graphs cannot be launched.
//
// Not checked: that streams which joined a capture are joined back before it ends.
#include <thread>
#include <utility>

#include "capture_rules.h"
#include "driver_call.h"
#include "streams.h"

using namespace cumem_sim;

namespace {

bool known_mode(const CUstreamCaptureMode& passed) {
    const int mode = number_of(passed);
    return mode == CU_STREAM_CAPTURE_MODE_GLOBAL || mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL ||
           mode == CU_STREAM_CAPTURE_MODE_RELAXED;
}

}  // namespace

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

// Never invalidates anything: callers use it to find out that they must not touch a stream.
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
