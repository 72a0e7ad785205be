// Captures of streams into graphs, and what may not be called while one is under way.

#include "streams.h"

#include <unistd.h>

#include <algorithm>

namespace standin {
namespace {

thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

std::vector<std::shared_ptr<Capture>>& under_way() {
  static auto& made = *new std::vector<std::shared_ptr<Capture>>;
  return made;
}

// The rule of cudaThreadExchangeStreamCaptureMode: a relaxed thread may call anything; a
// thread-local one only endangers captures that it began itself; a global one also those that
// other threads began in global mode.
bool endangers(const Capture& capture) {
  if (mode == cudaStreamCaptureModeRelaxed) return false;
  if (capture.owner == gettid()) return capture.mode != cudaStreamCaptureModeRelaxed;
  return capture.mode == cudaStreamCaptureModeGlobal && mode == cudaStreamCaptureModeGlobal;
}

struct Graph {
  std::vector<Task> tasks;
};

}  // namespace

bool refused_by_capture() {
  bool refused = false;
  for (auto& capture : under_way()) {
    if (!endangers(*capture)) continue;
    capture->valid = false;
    refused = true;
  }
  return refused;
}

}  // namespace standin

using namespace standin;

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* exchanged) {
  std::swap(mode, *exchanged);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode wanted) {
  STANDIN_CALL();
  static unsigned long long last_id = 0;
  std::lock_guard<std::mutex> held(world());
  Stream* stream = stream_of(handle);
  if (stream == nullptr || stream->capture) return failed(cudaErrorInvalidResourceHandle);
  stream->capture = std::make_shared<Capture>();
  stream->capture->id = ++last_id;
  stream->capture->mode = wanted;
  stream->capture->owner = gettid();
  stream->capture->streams.push_back(stream);
  under_way().push_back(stream->capture);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  STANDIN_CALL();
  std::lock_guard<std::mutex> held(world());
  Stream* stream = stream_of(handle);
  *graph = nullptr;
  if (stream == nullptr || !stream->capture) return failed(cudaErrorInvalidResourceHandle);
  std::shared_ptr<Capture> capture = stream->capture;
  capture->ended = true;
  for (Stream* member : capture->streams) member->capture = nullptr;
  under_way().erase(std::find(under_way().begin(), under_way().end(), capture));
  if (!capture->valid) return failed(cudaErrorStreamCaptureInvalidated);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph{capture->tasks});
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(handle, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
    cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
    size_t* number) {
  // Asked about the default stream, the runtime opens the context of the current device.
  if (handle == nullptr) open_context(current_device(), __func__);
  std::lock_guard<std::mutex> held(world());
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  Capture* capture = stream->capture.get();
  *status = capture == nullptr ? cudaStreamCaptureStatusNone
      : capture->valid         ? cudaStreamCaptureStatusActive
                               : cudaStreamCaptureStatusInvalidated;
  if (id != nullptr) *id = capture != nullptr ? capture->id : 0;
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(capture);
  if (nodes != nullptr) *nodes = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (number != nullptr) *number = 0;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(
    cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  STANDIN_CALL();
  std::unique_lock<std::mutex> held(world());
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  for (auto& task : reinterpret_cast<Graph*>(executable)->tasks) submit(held, stream, task);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* number) {
  *number = graph != nullptr ? reinterpret_cast<Graph*>(graph)->tasks.size() : 0;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<Graph*>(executable);
  return cudaSuccess;
}
