// Calls that are looked up by name while the program runs, and answers for those that are not
// there: each says its name and fails, instead of being a missing symbol.

#include "standin.h"

#include <dlfcn.h>

#include <array>
#include <mutex>
#include <utility>

namespace {

constexpr size_t most_entries = 128;
std::array<std::string, most_entries>& names() {
  static auto& made = *new std::array<std::string, most_entries>;
  return made;
}

template <size_t N>
int missing() {
  standin::unsupported(names()[N]);
  return CUDA_ERROR_NOT_SUPPORTED;
}

template <size_t... N>
std::array<int (*)(), most_entries> all_missing(std::index_sequence<N...>) {
  return {missing<N>...};
}

}  // namespace

// Called by the generated functions, one for each call that torch is linked to and that no file
// here defines (build.py).
STANDIN_CONTROL int standin_unsupported(const char* name, int error) {
  standin::unsupported(name);
  return error;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** entry, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
  static std::mutex lock;
  static size_t used = 0;
  if (result != nullptr) *result = cudaDriverEntryPointSuccess;
  *entry = dlsym(RTLD_DEFAULT, name);
  if (*entry != nullptr) return cudaSuccess;
  std::lock_guard<std::mutex> held(lock);
  static auto functions = all_missing(std::make_index_sequence<most_entries>());
  size_t number = 0;
  while (number < used && names()[number] != name) number++;
  if (number == most_entries) return standin::failed(cudaErrorNotSupported);
  if (number == used) names()[used++] = name;
  *entry = reinterpret_cast<void*>(functions[number]);
  return cudaSuccess;
}
