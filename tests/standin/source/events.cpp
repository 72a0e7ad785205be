// Events.  A handle shares its event with the streams that are still to reach it, so that an event
// may be destroyed at any time.

#include "streams.h"

using namespace standin;

namespace {

using Shared = std::shared_ptr<Event>;

Shared& shared(cudaEvent_t handle) {
  return *reinterpret_cast<Shared*>(handle);
}

cudaError_t record(cudaEvent_t handle, cudaStream_t on) {
  std::unique_lock<std::mutex> held(world());
  Shared event = shared(handle);
  Stream* stream = stream_of(on);
  if (stream == nullptr || stream->device != event->device)
    return failed(cudaErrorInvalidResourceHandle);
  event->capture = stream->capture;
  if (event->capture) return cudaSuccess;  // a point in the graph, not in time
  auto number = ++event->recorded;
  submit(held, stream, {nullptr, nullptr, [=] {
    // The same event may have been recorded again, and passed, on a stream that was quicker.
    if (event->reached >= number) return;
    event->reached = number;
    event->at = std::chrono::steady_clock::now();
  }});
  return cudaSuccess;
}

}  // namespace

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  STANDIN_CALL();
  open_context(current_device(), __func__);
  auto event = std::make_shared<Event>();
  event->device = current_device();
  event->timed = (flags & cudaEventDisableTiming) == 0;
  if (event->timed) count("event with timing");
  *handle = reinterpret_cast<cudaEvent_t>(new Shared(event));
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) {
  return cudaEventCreateWithFlags(handle, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  count(__func__);
  std::lock_guard<std::mutex> held(world());
  delete &shared(handle);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
  STANDIN_CALL();
  return record(handle, on);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned) {
  STANDIN_CALL();
  return record(handle, on);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t waits, cudaEvent_t handle, unsigned) {
  STANDIN_CALL();
  std::unique_lock<std::mutex> held(world());
  Shared event = shared(handle);
  Stream* stream = stream_of(waits);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (event->capture) {  // the stream joins the capture that the event is in
    if (event->capture->ended) return failed(cudaErrorCapturedEvent);
    if (stream->capture && stream->capture != event->capture)
      return failed(cudaErrorStreamCaptureIsolation);
    if (!stream->capture) event->capture->streams.push_back(stream);
    stream->capture = event->capture;
    return cudaSuccess;
  }
  auto number = event->recorded;  // later records do not concern this wait
  if (event->reached >= number) return cudaSuccess;
  if (stream->capture) {
    stream->capture->valid = false;
    return failed(cudaErrorStreamCaptureIsolation);
  }
  submit(held, stream, {[=] { return event->reached >= number; }, nullptr, nullptr});
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  STANDIN_CALL();
  std::lock_guard<std::mutex> held(world());
  Shared& event = shared(handle);
  if (event->capture) return failed(cudaErrorCapturedEvent);
  if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  return event->reached >= event->recorded ? cudaSuccess : failed(cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  STANDIN_CALL();
  std::unique_lock<std::mutex> held(world());
  Shared event = shared(handle);
  if (event->capture) return failed(cudaErrorCapturedEvent);
  if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  auto number = event->recorded;
  moved().wait(held, [&] { return event->reached >= number; });
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  std::lock_guard<std::mutex> held(world());
  Shared &first = shared(from), &second = shared(to);
  if (!first->timed || !second->timed) return failed(cudaErrorInvalidResourceHandle);
  if (first->reached < first->recorded || second->reached < second->recorded)
    return failed(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(second->at - first->at).count();
  return cudaSuccess;
}
