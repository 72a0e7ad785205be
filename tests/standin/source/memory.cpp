// Memory of the devices and of the host, and copies between them.

#include "streams.h"

#include <cstdlib>
#include <cstring>
#include <map>

namespace standin {
namespace {

struct Block {
  size_t bytes;
  int device;
};

// Never destroyed: torch frees memory while the process ends.
struct Memory {
  std::mutex lock;  // taken after `world()`
  std::map<const char*, Block> device, pinned;
  std::map<int, size_t> used;
};
Memory& memory() {
  static Memory& made = *new Memory;
  return made;
}

size_t capacity() {
  return static_cast<size_t>(setting("STANDIN_MEMORY_MB", 4096)) << 20;
}

const Block* block_of(const std::map<const char*, Block>& blocks, const void* address) {
  auto at = static_cast<const char*>(address);
  auto next = blocks.upper_bound(at);
  if (next == blocks.begin()) return nullptr;
  auto& [begin, block] = *std::prev(next);
  return at < begin + block.bytes ? &block : nullptr;
}

// As the runtime does: pageable memory of the host is read before the call returns, and written
// before it returns.
cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t on) {
  Place source = place_of(from), target = place_of(to);
  std::unique_lock<std::mutex> held(world());
  Stream* stream = stream_of(on);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  if (source == Place::pageable) {
    auto begin = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
    submit(held, stream, {nullptr, [=] { std::memcpy(to, staged->data(), bytes); }, nullptr});
  } else {
    submit(held, stream, {nullptr, [=] { std::memmove(to, from, bytes); }, nullptr});
  }
  if (target == Place::pageable && !stream->capture) wait_until_idle(held, stream);
  return cudaSuccess;
}

}  // namespace

Place place_of(const void* address) {
  std::lock_guard<std::mutex> held(memory().lock);
  if (block_of(memory().device, address) != nullptr) return Place::device;
  if (block_of(memory().pinned, address) != nullptr) return Place::pinned;
  return Place::pageable;
}

}  // namespace standin

using namespace standin;

cudaError_t cudaMalloc(void** address, size_t bytes) {
  STANDIN_CALL();
  {
    std::lock_guard<std::mutex> held(world());
    if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  }
  open_context(current_device(), __func__);
  std::lock_guard<std::mutex> held(memory().lock);
  size_t& used = memory().used[current_device()];
  if (used + bytes > capacity()) return failed(cudaErrorMemoryAllocation);
  if (posix_memalign(address, 512, bytes) != 0) return failed(cudaErrorMemoryAllocation);
  used += bytes;
  memory().device[static_cast<const char*>(*address)] = {bytes, current_device()};
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  STANDIN_CALL();
  if (address == nullptr) return cudaSuccess;
  {
    // The runtime waits for the device before it gives memory back.
    std::unique_lock<std::mutex> held(world());
    if (refused_by_capture()) return failed(cudaErrorStreamCaptureUnsupported);
  }
  if (cudaError_t error = cudaDeviceSynchronize()) return error;
  std::lock_guard<std::mutex> held(memory().lock);
  auto found = memory().device.find(static_cast<const char*>(address));
  if (found == memory().device.end()) return failed(cudaErrorInvalidValue);
  memory().used[found->second.device] -= found->second.bytes;
  memory().device.erase(found);
  std::free(address);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  open_context(current_device(), __func__);
  std::lock_guard<std::mutex> held(memory().lock);
  *total = capacity();
  *free = *total - memory().used[current_device()];
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  STANDIN_CALL();
  open_context(current_device(), __func__);
  if (posix_memalign(address, 4096, bytes) != 0) return failed(cudaErrorMemoryAllocation);
  return cudaHostRegister(*address, bytes, 0);
}

cudaError_t cudaFreeHost(void* address) {
  count(__func__);
  cudaHostUnregister(address);
  std::free(address);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  std::lock_guard<std::mutex> held(memory().lock);
  memory().pinned[static_cast<const char*>(address)] = {bytes, current_device()};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
  std::lock_guard<std::mutex> held(memory().lock);
  memory().pinned.erase(static_cast<const char*>(address));
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -1;
  std::lock_guard<std::mutex> held(memory().lock);
  const Block* block = block_of(memory().device, address);
  if (block != nullptr) attributes->type = cudaMemoryTypeDevice;
  if (block == nullptr && (block = block_of(memory().pinned, address)) != nullptr) {
    attributes->type = cudaMemoryTypeHost;
    attributes->hostPointer = const_cast<void*>(address);
  }
  if (block == nullptr) return cudaSuccess;
  attributes->device = block->device;
  attributes->devicePointer = const_cast<void*>(address);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t on) {
  STANDIN_CALL();
  return copy(to, from, bytes, on);
}

cudaError_t cudaMemcpyPeerAsync(
    void* to, int, const void* from, int, size_t bytes, cudaStream_t on) {
  STANDIN_CALL();
  return copy(to, from, bytes, on);
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  STANDIN_CALL();
  if (cudaError_t error = copy(to, from, bytes, nullptr)) return error;
  return cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemcpy2DAsync(
    void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
    cudaMemcpyKind, cudaStream_t on) {
  STANDIN_CALL();
  for (size_t row = 0; row < height; row++) {
    auto target = static_cast<char*>(to) + row * to_pitch;
    auto source = static_cast<const char*>(from) + row * from_pitch;
    if (cudaError_t error = copy(target, source, width, on)) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t on) {
  STANDIN_CALL();
  std::unique_lock<std::mutex> held(world());
  Stream* stream = stream_of(on);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  submit(held, stream, {nullptr, [=] { std::memset(at, value, bytes); }, nullptr});
  return cudaSuccess;
}

cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  if (cudaError_t error = cudaMemsetAsync(at, value, bytes, nullptr)) return error;
  return cudaStreamSynchronize(nullptr);
}
