// Devices, their contexts and errors, and the counters that tests read.

#include "standin.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace standin {
namespace {

constexpr int most_devices = 16;

thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;
std::atomic<int> stuck[most_devices];

// Never destroyed: threads of streams and of torch outlive `main`.
struct Records {
  std::mutex lock;
  std::map<std::string, long> counters;
  std::map<int, std::string> contexts;
  std::set<std::string> said;
};
Records& records() {
  static Records& made = *new Records;
  return made;
}

int device_count() {
  return static_cast<int>(setting("STANDIN_DEVICES", 2));
}

// Copies `text` to `out` as far as it fits; returns the room that all of it needs.
int hand_over(const std::string& text, char* out, int room) {
  if (room > 0) {
    std::strncpy(out, text.c_str(), room - 1);
    out[room - 1] = '\0';
  }
  return static_cast<int>(text.size()) + 1;
}

}  // namespace

long setting(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr ? std::atol(value) : otherwise;
}

void count(const std::string& name) {
  std::lock_guard<std::mutex> held(records().lock);
  records().counters[name]++;
}

void unsupported(const std::string& name) {
  std::lock_guard<std::mutex> held(records().lock);
  records().counters["unsupported: " + name]++;
  if (records().said.insert(name).second)
    std::fprintf(stderr, "stand-in: %s is not supported\n", name.c_str());
}

int current_device() {
  return device;
}

void open_context(int of, const char* call) {
  std::lock_guard<std::mutex> held(records().lock);
  bool main_thread = getpid() == gettid();
  records().contexts.emplace(
      of, std::string(call) + (main_thread ? " on the main thread" : " on another thread"));
}

cudaError_t failed(cudaError_t error) {
  last_error = error;
  return error;
}

cudaError_t broken(int of) {
  return static_cast<cudaError_t>(stuck[of].load());
}

}  // namespace standin

using namespace standin;

// -- what tests ask and tell ---------------------------------------------------------------

// "name=count" per line.  Each of these two returns the room needed; call again if it was more.
STANDIN_CONTROL int standin_counters(char* out, int room) {
  std::lock_guard<std::mutex> held(records().lock);
  std::string text;
  for (auto& [name, number] : records().counters)
    text += name + "=" + std::to_string(number) + "\n";
  return hand_over(text, out, room);
}

// "device=who opened it" per line.
STANDIN_CONTROL int standin_contexts(char* out, int room) {
  std::lock_guard<std::mutex> held(records().lock);
  std::string text;
  for (auto& [of, who] : records().contexts) text += std::to_string(of) + "=" + who + "\n";
  return hand_over(text, out, room);
}

STANDIN_CONTROL void standin_reset_counters() {
  std::lock_guard<std::mutex> held(records().lock);
  records().counters.clear();
}

// From now on every call on the device fails with `error`, until the process ends: what an illegal
// address in a kernel does.
STANDIN_CONTROL void standin_break_device(int of, int error) {
  stuck[of] = error;
}

// -- the runtime's calls --------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* number) {
  *number = device_count();
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* current) {
  *current = device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int wanted) {
  count(__func__);
  if (wanted < 0 || wanted >= device_count()) return failed(cudaErrorInvalidDevice);
  device = wanted;
  // Since CUDA 12 this call opens the device's primary context.
  open_context(wanted, __func__);
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return cudaSuccess;
}

// No device reaches another: copies between them go through `cudaMemcpyPeerAsync`.
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* out, int room, int of) {
  std::snprintf(out, room, "0000:%02x:00.0", of + 1);
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int of) {
  if (of < 0 || of >= device_count()) return failed(cudaErrorInvalidDevice);
  std::memset(properties, 0, sizeof *properties);
  std::snprintf(properties->name, sizeof properties->name, "stand-in %d", of);
  // The shape of an H100, since torch derives launch sizes from it.
  properties->major = 9;
  properties->warpSize = 32;
  properties->multiProcessorCount = 132;
  properties->regsPerBlock = 65536;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerMultiprocessor = 228 << 10;
  properties->l2CacheSize = 50 << 20;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->totalGlobalMem = static_cast<size_t>(setting("STANDIN_MEMORY_MB", 4096)) << 20;
  properties->unifiedAddressing = 1;
  properties->pciBusID = of + 1;
  properties->uuid.bytes[0] = static_cast<char>(of);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int of) {
  cudaDeviceProp properties;
  if (cudaError_t error = cudaGetDeviceProperties(&properties, of)) return error;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
    default: *value = 0;  // a feature that the stand-in does not have
  }
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() {
  return last_error;
}

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
    case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNotSupported: return "cudaErrorNotSupported";
    case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
    case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
    case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
    case cudaErrorCapturedEvent: return "cudaErrorCapturedEvent";
    default: return "another error of the stand-in";
  }
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    default: return cudaGetErrorName(error);
  }
}

cudaError_t cudaProfilerStart() {
  return cudaSuccess;
}

cudaError_t cudaProfilerStop() {
  return cudaSuccess;
}

// -- the few calls of the driver that torch makes ------------------------------------------------

CUresult cuInit(unsigned) {
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* handle, int of) {
  *handle = of;
  return CUDA_SUCCESS;
}

// How torch finds out whether a device was used, before it does anything there.
CUresult cuDevicePrimaryCtxGetState(CUdevice of, unsigned* flags, int* active) {
  if (flags != nullptr) *flags = 0;
  std::lock_guard<std::mutex> held(records().lock);
  *active = static_cast<int>(records().contexts.count(of));
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the stand-in's driver";
  return CUDA_SUCCESS;
}
