// Streams, events and host functions.
//
// Each stream has a thread, started with its first work. Legacy stream semantics hold: its work waits for what was
// enqueued before on every blocking stream of the context, and their later work waits for it. Work after a failed one
// is dropped, as on a GPU whose context is lost.
#include "streams.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <csignal>

#include "capture_rules.h"
#include "process_board.h"

using namespace cumem_sim;

namespace {

bool is_done(const std::shared_ptr<Completion>& completion) { return !completion || completion->done; }

// A stream's thread runs code of this library for as long as the process lives: dlclose must not unload it.
void keep_library_loaded() {
    Dl_info info{};
    if (!dladdr(reinterpret_cast<void*>(&keep_library_loaded), &info)) return;
    dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
}

void finish(Simulation& sim, Work& work) {
    work.completion->done = true;
    work_ended();
    sim.progress.notify_all();
}

void run_stream(const std::shared_ptr<Stream>& stream) {
    keep_library_loaded();                             // before the lock: the dynamic loader has its own
    pthread_setname_np(pthread_self(), "sim-stream");  // else it has the name of the thread that began the stream
    Simulation& sim = Simulation::instance();
    this_thread().runs_stream_work = true;
    Lock lock(sim.mutex);
    while (true) {
        sim.progress.wait(lock, [&] { return !stream->queue.empty() || stream->destroyed; });
        if (stream->queue.empty()) break;
        Work work = std::move(stream->queue.front());
        stream->queue.pop_front();
        sim.progress.wait(lock, [&] { return std::all_of(work.after.begin(), work.after.end(), is_done); });
        if (work.run && stream->context.fault == CUDA_SUCCESS) {
            const CUresult result = work.run(lock);
            if (result != CUDA_SUCCESS) stream->context.fault = result;
        }
        finish(sim, work);
    }
    auto& streams = stream->context.streams;
    streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
}

// Signals stay with the program's own threads, except those that a fault in this thread raises.
void start_worker(const std::shared_ptr<Stream>& stream) {
    sigset_t blocked, previous;
    sigfillset(&blocked);
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&blocked, signal);
    pthread_sigmask(SIG_SETMASK, &blocked, &previous);
    try {
        std::thread(run_stream, stream).detach();
        stream->has_worker = true;
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &previous, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
}

// What work on this stream must wait for under legacy stream semantics.
std::vector<std::shared_ptr<Completion>> legacy_order(const Stream& stream) {
    const Context& context = stream.context;
    std::vector<std::shared_ptr<Completion>> after;
    if (&stream == context.legacy.get()) {
        for (const auto& other : context.streams) {
            if (other->blocking && !is_done(other->last)) after.push_back(other->last);
        }
    } else if (stream.blocking && context.legacy && !is_done(context.legacy->last)) {
        after.push_back(context.legacy->last);
    }
    return after;
}

CUresult create_stream(const char* name, CUstream* phStream, unsigned int flags) {
    return driver_call(name, Needs::kContext, [&](Call& call) {
        require(phStream, CUDA_ERROR_INVALID_VALUE);
        require(flags == CU_STREAM_DEFAULT || flags == CU_STREAM_NON_BLOCKING, CUDA_ERROR_INVALID_VALUE);
        refuse_after_fault(*call.context);
        const auto handle = reinterpret_cast<CUstream>(call.sim.new_handle());
        auto stream = std::make_shared<Stream>(handle, *call.context, flags != CU_STREAM_NON_BLOCKING);
        call.context->streams.push_back(stream);
        call.sim.streams.emplace(handle, std::move(stream));
        *phStream = handle;
        return CUDA_SUCCESS;
    });
}

std::shared_ptr<Event> find_event(Simulation& sim, CUevent handle) {
    const auto event = sim.events.find(handle);
    require(event != sim.events.end(), CUDA_ERROR_INVALID_HANDLE);
    return event->second;
}

// An event that a capture recorded stands for no work that will ever run.
void refuse_captured(const Event& event) {
    if (!event.capture) return;
    event.capture->invalidated = true;
    throw Refused{CUDA_ERROR_CAPTURED_EVENT};
}

// Through an event recorded in a capture, a stream joins that capture.
void join_capture(const std::shared_ptr<Stream>& stream, const Event& event) {
    const auto& capture = event.capture;
    require(!capture->ended, CUDA_ERROR_CAPTURED_EVENT);
    if (stream->capture && stream->capture != capture) {
        stream->capture->invalidated = capture->invalidated = true;
        throw Refused{CUDA_ERROR_STREAM_CAPTURE_MERGE};
    }
    require(!capture->invalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    if (!stream->capture) {
        require(stream != stream->context.legacy, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        stream->capture = capture;
        capture->streams.push_back(stream);
    }
}

// The checks that cuEventQuery and cuEventSynchronize share.
std::shared_ptr<Event> event_to_wait_for(Call& call, CUevent handle) {
    auto event = find_event(call.sim, handle);
    refuse_after_fault(*event->context);
    refuse_captured(*event);
    refuse_if_unsafe_for_captures(call.sim);
    return event;
}

}  // namespace

namespace cumem_sim {

std::shared_ptr<Stream> find_stream(Call& call, CUstream handle) {
    require(handle != CU_STREAM_PER_THREAD, CUDA_ERROR_NOT_SUPPORTED);
    if (!handle || handle == CU_STREAM_LEGACY) return call.context->legacy;
    const auto stream = call.sim.streams.find(handle);
    require(stream != call.sim.streams.end(), CUDA_ERROR_INVALID_HANDLE);
    return stream->second;
}

std::shared_ptr<Stream> stream_for_work(Call& call, CUstream handle) {
    auto stream = find_stream(call, handle);
    require(&stream->context == call.context, CUDA_ERROR_INVALID_HANDLE);
    refuse_after_fault(*call.context);
    if (stream == call.context->legacy) refuse_if_legacy_stream_is_blocked(call.sim, *call.context);
    return stream;
}

void refuse_after_fault(const Context& context) { require(context.fault == CUDA_SUCCESS, context.fault); }

void enqueue(Call& call, const std::shared_ptr<Stream>& stream, Work work) {
    if (stream->capture) {
        require(!stream->capture->invalidated, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        ++stream->capture->nodes;
        return;
    }
    for (auto& completion : legacy_order(*stream)) work.after.push_back(std::move(completion));
    if (!stream->has_worker) start_worker(stream);
    stream->last = work.completion;
    stream->queue.push_back(std::move(work));
    work_enqueued();
    call.sim.progress.notify_all();
}

bool is_idle(const Stream& stream) { return is_done(stream.last); }

bool is_idle(const Context& context) {
    return std::all_of(context.streams.begin(), context.streams.end(), [](const auto& s) { return is_idle(*s); });
}

void synchronize(Call& call, const Stream& stream) {
    const auto last = stream.last;
    call.wait([&] { return is_done(last); });
    refuse_after_fault(stream.context);
}

void synchronize(Call& call, const Context& context) {
    std::vector<std::shared_ptr<Completion>> pending;
    for (const auto& stream : context.streams) pending.push_back(stream->last);
    call.wait([&] { return std::all_of(pending.begin(), pending.end(), is_done); });
    refuse_after_fault(context);
}

void destroy_stream(Simulation& sim, const std::shared_ptr<Stream>& stream) {
    if (stream->capture) stream->capture->invalidated = true;
    sim.streams.erase(stream->handle);
    stream->destroyed = true;
    sim.progress.notify_all();
    auto& streams = stream->context.streams;
    if (!stream->has_worker) streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
}

std::shared_ptr<Stream> new_legacy_stream(Simulation& sim, Context& context) {
    auto stream = std::make_shared<Stream>(reinterpret_cast<CUstream>(sim.new_handle()), context, false);
    context.streams.push_back(stream);
    return stream;
}

}  // namespace cumem_sim

CUresult CUDAAPI cuStreamCreate(CUstream* phStream, unsigned int Flags) {
    return create_stream("cuStreamCreate", phStream, Flags);
}

// All priorities are the same here; CUDA clamps what it does not have.
CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* phStream, unsigned int flags, int) {
    return create_stream("cuStreamCreateWithPriority", phStream, flags);
}

CUresult CUDAAPI cuStreamDestroy(CUstream hStream) {
    return driver_call("cuStreamDestroy", Needs::kContext, [&](Call& call) {
        const auto stream = find_stream(call, hStream);
        require(stream != call.context->legacy, CUDA_ERROR_INVALID_HANDLE);
        destroy_stream(call.sim, stream);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuStreamSynchronize(CUstream hStream) {
    return driver_call("cuStreamSynchronize", Needs::kContext, [&](Call& call) {
        const auto stream = find_stream(call, hStream);
        refuse_after_fault(stream->context);
        refuse_if_capturing(*stream);
        if (stream == call.context->legacy) refuse_if_legacy_stream_is_blocked(call.sim, *call.context);
        refuse_if_unsafe_for_captures(call.sim);
        synchronize(call, *stream);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuStreamQuery(CUstream hStream) {
    return driver_call("cuStreamQuery", Needs::kContext, [&](Call& call) {
        const auto stream = find_stream(call, hStream);
        refuse_after_fault(stream->context);
        refuse_if_capturing(*stream);
        if (stream == call.context->legacy) refuse_if_legacy_stream_is_blocked(call.sim, *call.context);
        return is_idle(*stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    });
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int Flags) {
    return driver_call("cuStreamWaitEvent", Needs::kContext, [&](Call& call) {
        const bool known = Flags == CU_EVENT_WAIT_DEFAULT || Flags == CU_EVENT_WAIT_EXTERNAL;
        require(known, CUDA_ERROR_INVALID_VALUE);
        const auto stream = stream_for_work(call, hStream);
        const auto event = find_event(call.sim, hEvent);
        if (event->capture) {
            join_capture(stream, *event);
        } else if (event->recorded && stream->capture) {
            stream->capture->invalidated = true;
            return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
        } else if (event->recorded) {
            Work wait;
            wait.after.push_back(event->recorded);
            enqueue(call, stream, std::move(wait));
        }
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuEventCreate(CUevent* phEvent, unsigned int Flags) {
    return driver_call("cuEventCreate", Needs::kContext, [&](Call& call) {
        constexpr unsigned int kKnown = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
        require(phEvent && !(Flags & ~kKnown), CUDA_ERROR_INVALID_VALUE);
        const bool timed = !(Flags & CU_EVENT_DISABLE_TIMING);
        require(!(Flags & CU_EVENT_INTERPROCESS) || !timed, CUDA_ERROR_INVALID_VALUE);
        refuse_after_fault(*call.context);
        auto event = std::make_shared<Event>();
        event->context = call.context;
        *phEvent = reinterpret_cast<CUevent>(call.sim.new_handle());
        call.sim.events.emplace(*phEvent, std::move(event));
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuEventDestroy(CUevent hEvent) {
    return driver_call("cuEventDestroy", Needs::kContext, [&](Call& call) {
        find_event(call.sim, hEvent);
        call.sim.events.erase(hEvent);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuEventRecord(CUevent hEvent, CUstream hStream) {
    return driver_call("cuEventRecord", Needs::kContext, [&](Call& call) {
        const auto stream = stream_for_work(call, hStream);
        const auto event = find_event(call.sim, hEvent);
        require(event->context == call.context, CUDA_ERROR_INVALID_HANDLE);
        Work record;
        const auto completion = record.completion;
        enqueue(call, stream, std::move(record));
        event->capture = stream->capture;
        event->recorded = stream->capture ? nullptr : completion;
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuEventSynchronize(CUevent hEvent) {
    return driver_call("cuEventSynchronize", Needs::kContext, [&](Call& call) {
        const auto event = event_to_wait_for(call, hEvent);
        const auto recorded = event->recorded;
        call.wait([&] { return is_done(recorded); });
        refuse_after_fault(*event->context);
        return CUDA_SUCCESS;
    });
}

CUresult CUDAAPI cuEventQuery(CUevent hEvent) {
    return driver_call("cuEventQuery", Needs::kContext, [&](Call& call) {
        return is_done(event_to_wait_for(call, hEvent)->recorded) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    });
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void* userData) {
    return driver_call("cuLaunchHostFunc", Needs::kContext, [&](Call& call) {
        require(fn, CUDA_ERROR_INVALID_VALUE);
        const auto stream = stream_for_work(call, hStream);
        Work work;
        work.run = [fn, userData](Lock& lock) {
            const Unlocked unlocked(lock);
            fn(userData);
            return CUDA_SUCCESS;
        };
        enqueue(call, stream, std::move(work));
        return CUDA_SUCCESS;
    });
}
