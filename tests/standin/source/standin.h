// What the parts of the stand-in share: counters, contexts, errors, settings.
#pragma once

// The library is built with hidden visibility, so that its C++ templates do not replace torch's.
// What NVIDIA's headers declare is what it offers.
#pragma GCC visibility push(default)
#include <cuda.h>
#include <cuda_runtime_api.h>
// NCCL's header includes these three, uses nothing of them, and they need the CUDA C++ library.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#pragma GCC visibility pop

#include <string>

#define STANDIN_CONTROL extern "C" __attribute__((visibility("default")))

namespace standin {

// A number from the environment; read at every use, so that a test may set it late.
long setting(const char* name, long otherwise);

// Adds one to the counter `name`.
void count(const std::string& name);

// Says on standard error, once per `name`, that it is not there, and counts it.
void unsupported(const std::string& name);

// -- devices (device.cpp) ------------------------------------------------------------------

// The calling thread's current device.
int current_device();

// Opens the device's context for this process if it has none yet; `call` is who needed it.
void open_context(int device, const char* call);

// Remembers `error` as the thread's last one, and returns it.
cudaError_t failed(cudaError_t error);

// The error that a device is stuck with, as after an illegal address; cudaSuccess otherwise.
cudaError_t broken(int device);

// -- memory (memory.cpp) -------------------------------------------------------------------

enum class Place { device, pinned, pageable };
Place place_of(const void* address);

}  // namespace standin

// Counts the call, and refuses it on a device that an earlier error has broken.
#define STANDIN_CALL()                                                                \
  do {                                                                                \
    standin::count(__func__);                                                         \
    if (cudaError_t stuck = standin::broken(standin::current_device()))               \
      return standin::failed(stuck);                                                  \
  } while (false)
