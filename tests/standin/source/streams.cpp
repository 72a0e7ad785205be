// Streams: each is a queue that a thread works off in order.

#include "streams.h"

#include <map>
#include <thread>

namespace standin {
namespace {

// Never destroyed: the threads of streams outlive `main`.
struct Streams {
  std::map<cudaStream_t, Stream*> created;
  std::map<int, Stream*> defaults;  // by device
};
Streams& streams() {
  static Streams& made = *new Streams;
  return made;
}

void serve(Stream* stream) {
  std::unique_lock<std::mutex> held(world());
  for (;;) {
    stream->filled.wait(held, [&] { return !stream->queue.empty() || stream->destroyed; });
    if (stream->queue.empty()) return;  // not freed: somebody may be waiting for it
    Task& task = stream->queue.front();  // stays where it is while others are appended
    moved().wait(held, [&] { return !task.ready || task.ready(); });
    if (task.work) {
      held.unlock();
      task.work();
      held.lock();
    }
    if (task.mark) task.mark();
    stream->queue.pop_front();
    moved().notify_all();
  }
}

Stream* made(int device, int priority) {
  auto* stream = new Stream;
  stream->device = device;
  stream->priority = priority;
  return stream;
}

void start(Stream* stream) {
  if (stream->started) return;
  stream->started = true;
  std::thread(serve, stream).detach();
}

}  // namespace

std::mutex& world() {
  static std::mutex& made = *new std::mutex;
  return made;
}

std::condition_variable& moved() {
  static std::condition_variable& made = *new std::condition_variable;
  return made;
}

Stream* stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
    Stream*& found = streams().defaults[current_device()];
    if (found == nullptr) found = made(current_device(), 0);
    return found;
  }
  auto found = streams().created.find(handle);
  return found == streams().created.end() ? nullptr : found->second;
}

void submit(std::unique_lock<std::mutex>& held, Stream* stream, Task task) {
  if (stream->capture) {
    stream->capture->tasks.push_back(std::move(task));
    return;
  }
  auto most = static_cast<size_t>(setting("STANDIN_QUEUE", 1024));
  moved().wait(held, [&] { return stream->queue.size() < most; });
  stream->queue.push_back(std::move(task));
  start(stream);
  stream->filled.notify_all();
}

void wait_until_idle(std::unique_lock<std::mutex>& held, Stream* stream) {
  moved().wait(held, [&] { return stream->queue.empty(); });
}

}  // namespace standin

using namespace standin;

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int priority) {
  STANDIN_CALL();
  open_context(current_device(), __func__);
  std::lock_guard<std::mutex> held(world());
  Stream* stream = made(current_device(), priority);
  *handle = reinterpret_cast<cudaStream_t>(stream);
  streams().created[*handle] = stream;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* handle) {
  return cudaStreamCreateWithPriority(handle, cudaStreamDefault, 0);
}

// Returns at once; what was given to the stream is still done.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  count(__func__);
  std::lock_guard<std::mutex> held(world());
  Stream* stream = stream_of(handle);
  if (handle == nullptr || stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  streams().created.erase(handle);
  stream->destroyed = true;
  start(stream);  // the thread ends the stream, even one that never had anything to do
  stream->filled.notify_all();
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  std::lock_guard<std::mutex> held(world());
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  *priority = stream->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  STANDIN_CALL();
  std::lock_guard<std::mutex> held(world());
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  return stream->queue.empty() ? cudaSuccess : failed(cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  STANDIN_CALL();
  std::unique_lock<std::mutex> held(world());
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  wait_until_idle(held, stream);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  STANDIN_CALL();
  std::unique_lock<std::mutex> held(world());
  if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  int device = current_device();
  moved().wait(held, [&] {
    for (auto& [handle, stream] : streams().created)
      if (stream->device == device && !stream->queue.empty()) return false;
    auto found = streams().defaults.find(device);
    return found == streams().defaults.end() || found->second->queue.empty();
  });
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
  STANDIN_CALL();
  std::unique_lock<std::mutex> held(world());
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  submit(held, stream, {nullptr, [=] { function(argument); }, nullptr});
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(
    cudaStream_t handle, cudaStreamCallback_t function, void* argument, unsigned) {
  STANDIN_CALL();
  std::unique_lock<std::mutex> held(world());
  Stream* stream = stream_of(handle);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  submit(held, stream, {nullptr, [=] { function(handle, cudaSuccess, argument); }, nullptr});
  return cudaSuccess;
}
