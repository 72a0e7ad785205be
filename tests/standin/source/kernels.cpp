// Kernels.  They are device code, which cannot run here: a launch takes its turn in the stream and
// does nothing.  Three are done by the host, so that tests can fill memory, copy between layouts
// and keep a stream busy by the same calls as on a device; they are known by the names under which
// torch registers them, and have the arguments that torch 2.13 gives them.  Every other kernel is
// named on standard error and in the counters.

#include "streams.h"

#include <unistd.h>

#include <cstring>
#include <map>

namespace standin {
namespace {

using Launch = std::function<void()>;

struct Kernels {
  std::mutex lock;
  std::map<const void*, std::string> names;  // by the function on the host
};
Kernels& kernels() {
  static Kernels& made = *new Kernels;
  return made;
}

// Bytes of the element type that begins `mangled` (Itanium C++ ABI); 0 for one not known.
size_t width_of(const char* mangled) {
  static const std::pair<const char*, size_t> widths[] = {
      {"b", 1}, {"a", 1}, {"h", 1}, {"s", 2}, {"i", 4}, {"l", 8}, {"f", 4}, {"d", 8},
      {"N3c104HalfE", 2}, {"N3c108BFloat16E", 2},
  };
  for (auto& [name, width] : widths)
    if (std::strncmp(mangled, name, std::strlen(name)) == 0) return width;
  return 0;
}

// `Tensor.fill_`: arguments are the number of elements, the functor that holds the value, and the
// addresses.
Launch fill(const std::string& name, void** arguments) {
  static const char functor[] = "11FillFunctorI";
  auto at = name.find(functor);
  if (at == std::string::npos || name.find("elementwise_kernel") == std::string::npos) return {};
  size_t width = width_of(name.c_str() + at + sizeof functor - 1);
  if (width == 0) return {};
  auto elements = static_cast<size_t>(*static_cast<int*>(arguments[0]));
  auto begin = static_cast<char*>(arguments[1]);
  std::string value(begin, begin + width);  // the arguments end with the call
  char* target = *static_cast<char**>(arguments[2]);
  return [=] {
    for (size_t i = 0; i < elements; i++) std::memcpy(target + i * width, value.data(), width);
  };
}

// What the kernel of a copy between two layouts gets: how to find an element by its number, then
// the two addresses.  `OffsetCalculator` and its `IntDivider` in torch's own headers.
struct Layouts {
  int dims;
  struct {
    unsigned size, multiplier, shift;
  } sizes[25];
  unsigned strides[25][2];  // in bytes: where it goes, where it comes from
  char* addresses[2];
};

// `Tensor.copy_` where one of the two is not contiguous.
Launch strided_copy(const std::string& name, void** arguments) {
  if (name.find("18elementwise_kernel") == std::string::npos) return {};
  if (name.find("direct_copy_kernel_cuda") == std::string::npos) return {};
  // The function that the kernel is made with takes one element, and its name ends in its type.
  static const char parameter[] = "EUl";
  auto at = name.rfind(parameter, name.rfind("E_EEvS"));
  size_t width = at == std::string::npos ? 0 : width_of(name.c_str() + at + sizeof parameter - 1);
  auto elements = static_cast<unsigned>(*static_cast<int*>(arguments[0]));
  Layouts layouts = *static_cast<Layouts*>(arguments[1]);
  if (width == 0 || layouts.dims < 1 || layouts.dims > 25) return {};
  unsigned long product = 1;
  for (int dim = 0; dim < layouts.dims; dim++) product *= layouts.sizes[dim].size;
  if (product != elements) return {};  // torch has changed what it passes
  return [=] {
    for (unsigned i = 0; i < elements; i++) {
      size_t to = 0, from = 0;
      unsigned rest = i;
      for (int dim = 0; dim < layouts.dims; dim++) {
        unsigned index = rest % layouts.sizes[dim].size;
        rest /= layouts.sizes[dim].size;
        to += size_t{index} * layouts.strides[dim][0];
        from += size_t{index} * layouts.strides[dim][1];
      }
      std::memcpy(layouts.addresses[0] + to, layouts.addresses[1] + from, width);
    }
  };
}

// `torch.cuda._sleep`: a cycle is a nanosecond.
Launch sleep(const std::string& name, void** arguments) {
  if (name.find("spin_kernel") == std::string::npos) return {};
  auto cycles = *static_cast<long*>(arguments[0]);
  return [=] { usleep(static_cast<useconds_t>(cycles / 1000)); };
}

cudaError_t launch(const void* function, void** arguments, cudaStream_t on) {
  std::string name;
  {
    std::lock_guard<std::mutex> held(kernels().lock);
    name = kernels().names[function];
  }
  Launch work = fill(name, arguments);
  if (!work) work = strided_copy(name, arguments);
  if (!work) work = sleep(name, arguments);
  if (!work) {
    unsupported("kernel " + name);
    work = [] {};
  }
  std::unique_lock<std::mutex> held(world());
  Stream* stream = stream_of(on);
  if (stream == nullptr) return failed(cudaErrorInvalidResourceHandle);
  submit(held, stream, {nullptr, work, nullptr});
  return cudaSuccess;
}

// What <<<...>>> sets, for the launch that follows on the same thread.
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace
}  // namespace standin

using namespace standin;

cudaError_t cudaLaunchKernel(
    const void* function, dim3, dim3, void** arguments, size_t, cudaStream_t on) {
  STANDIN_CALL();
  return launch(function, arguments, on);
}

cudaError_t cudaLaunchKernelExC(
    const cudaLaunchConfig_t* configuration, const void* function, void** arguments) {
  STANDIN_CALL();
  return launch(function, arguments, configuration->stream);
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

// -- what the compiler puts into torch, in no header ------------------------------------------

#define STANDIN_COMPILER extern "C" __attribute__((visibility("default")))

STANDIN_COMPILER void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

STANDIN_COMPILER void __cudaRegisterFatBinaryEnd(void**) {}

STANDIN_COMPILER void __cudaUnregisterFatBinary(void**) {}

STANDIN_COMPILER char __cudaInitModule(void**) {
  return 1;
}

STANDIN_COMPILER void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

STANDIN_COMPILER void __cudaRegisterFunction(
    void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  std::lock_guard<std::mutex> held(kernels().lock);
  kernels().names[function] = name;
}

STANDIN_COMPILER cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

STANDIN_COMPILER cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3, dim3, void** arguments, size_t, cudaStream_t on) {
  count("cudaLaunchKernel");
  return launch(kernel, arguments, on);
}

STANDIN_COMPILER unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

STANDIN_COMPILER cudaError_t __cudaPopCallConfiguration(
    dim3* grid, dim3* block, size_t* shared, void* stream) {
  Configuration& last = configurations.back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  configurations.pop_back();
  return cudaSuccess;
}

// A device variable that no kernel will read.
cudaError_t cudaGetSymbolAddress(void** address, const void*) {
  static char variable[1 << 16];
  *address = variable;
  return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}
