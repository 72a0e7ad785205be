// NCCL's calls.  Operations are kernels in a stream, as NCCL's are; what they move, goes over
// sockets.

#include "streams.h"
#include "transfers.h"

#include <unistd.h>

#include <cstring>
#include <atomic>
#include <map>
#include <mutex>

namespace standin {
namespace {

// What a kernel does; false if the communicator was aborted under it.
using Kernel = std::function<bool(ncclComm&)>;

struct Communicators {
  std::mutex lock;
  std::vector<ncclComm*> all;
  std::mutex making;
  std::atomic<bool> posts_fail{false};
};
Communicators& communicators() {
  static Communicators& made = *new Communicators;
  return made;
}

// Sends and receives between ncclGroupStart and ncclGroupEnd: one kernel per communicator and
// stream.
thread_local int group_depth = 0;
thread_local std::map<std::pair<ncclComm*, cudaStream_t>, std::vector<Transfer>> grouped;

size_t width_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 4;
  }
}

ncclResult_t launch(ncclComm* comm, cudaStream_t on, Kernel kernel) {
  if (comm->aborted) return ncclInvalidUsage;
  if (communicators().posts_fail) return ncclInternalError;
  count("nccl kernel");
  std::unique_lock<std::mutex> held(world());
  Stream* stream = stream_of(on);
  if (stream == nullptr) return ncclUnhandledCudaError;
  comm->running++;
  submit(held, stream, {nullptr, [=] {
    kernel(*comm);
    comm->running--;
  }, nullptr});
  return ncclSuccess;
}

ncclResult_t post(ncclComm* comm, cudaStream_t on, Transfer transfer) {
  if (transfer.peer < 0 || transfer.peer >= comm->size) return ncclInvalidArgument;
  if (group_depth > 0) {
    grouped[{comm, on}].push_back(transfer);
    return ncclSuccess;
  }
  return launch(comm, on, [=](ncclComm& c) { return standin::transfer(c, {transfer}); });
}

template <class Number>
void add(char* sum, const char* other, size_t elements) {
  for (size_t i = 0; i < elements; i++) {
    Number left, right;
    std::memcpy(&left, sum + i * sizeof(Number), sizeof left);
    std::memcpy(&right, other + i * sizeof(Number), sizeof right);
    left = static_cast<Number>(left + right);
    std::memcpy(sum + i * sizeof(Number), &left, sizeof left);
  }
}

void (*adder(ncclDataType_t type))(char*, const char*, size_t) {
  switch (type) {
    case ncclUint8: return add<std::uint8_t>;
    case ncclInt32: return add<std::int32_t>;
    case ncclInt64: return add<std::int64_t>;
    case ncclFloat32: return add<float>;
    case ncclFloat64: return add<double>;
    default: return nullptr;
  }
}

std::vector<Transfer> with_every_other(const ncclComm& comm, bool sends, char* memory, size_t n) {
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < comm.size; peer++)
    if (peer != comm.rank) transfers.push_back({sends, peer, memory, n});
  return transfers;
}

bool broadcast(ncclComm& comm, const char* from, char* to, size_t bytes, int root) {
  if (comm.rank != root) return transfer(comm, {{false, root, to, bytes}});
  if (from != to) std::memcpy(to, from, bytes);
  return transfer(comm, with_every_other(comm, true, const_cast<char*>(from), bytes));
}

ncclResult_t initialise(ncclComm_t* made, int size, const ncclUniqueId& meeting, int rank) {
  count("ncclCommInitRank");
  open_context(current_device(), "ncclCommInitRank");
  auto* comm = new ncclComm;  // not freed: kernels and torch's threads may still look at it
  comm->rank = rank;
  comm->size = size;
  // As a library that makes one communicator at a time in a process: ranks that make theirs in
  // different orders wait for each other for ever.
  std::unique_lock<std::mutex> alone(communicators().making, std::defer_lock);
  if (setting("STANDIN_ONE_INIT_AT_A_TIME", 0)) alone.lock();
  if (!connect_all(*comm, meeting)) return ncclSystemError;
  std::lock_guard<std::mutex> held(communicators().lock);
  communicators().all.push_back(comm);
  *made = comm;
  return ncclSuccess;
}

void hang_up(ncclComm& comm) {
  for (auto* sockets : {&comm.to, &comm.from}) {
    for (int each : *sockets) close(each);
    sockets->clear();
  }
}

}  // namespace
}  // namespace standin

using namespace standin;

// Every communicator of this process reports that a remote process is gone.
STANDIN_CONTROL void standin_break_communicators() {
  std::lock_guard<std::mutex> held(communicators().lock);
  for (auto* comm : communicators().all) comm->error = ncclRemoteError;
}

// Every operation that is posted from now on fails at the post.
STANDIN_CONTROL void standin_refuse_posts() {
  communicators().posts_fail = true;
}

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t error) {
  switch (error) {
    case ncclSuccess: return "no error";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInternalError: return "internal error";
    case ncclInvalidUsage: return "invalid usage";
    case ncclInvalidArgument: return "invalid argument";
    default: return "another error of the stand-in";
  }
}

const char* ncclGetLastError(ncclComm_t) {
  return "";
}

// -- communicators ----------------------------------------------------------------------------

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  *id = new_meeting();
  return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) {
  return initialise(comm, size, id, rank);
}

ncclResult_t ncclCommInitRankConfig(
    ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (config != nullptr && config->maxCTAs != NCCL_CONFIG_UNDEF_INT)
    count("communicator of at most " + std::to_string(config->maxCTAs) + " CTAs");
  return initialise(comm, size, id, rank);
}

ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* comm, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return initialise(comm, size, ids[0], rank);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  count(__func__);
  while (comm->running > 0 && !comm->aborted) usleep(1000);
  return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  count(__func__);
  ncclCommFinalize(comm);
  hang_up(*comm);
  return ncclSuccess;
}

// Ends the kernels that run; what they were to write is not written.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  count(__func__);
  comm->aborted = true;
  while (comm->running > 0) usleep(1000);
  hang_up(*comm);
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  *error = static_cast<ncclResult_t>(comm->error.load());
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) {
  *size = comm->size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

// Registered memory is a matter of speed.
ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}

ncclResult_t ncclCommDeregister(const ncclComm_t, void*) {
  return ncclSuccess;
}

// -- operations ---------------------------------------------------------------------------------

ncclResult_t ncclGroupStart() {
  group_depth++;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (--group_depth > 0) return ncclSuccess;
  auto posted = std::move(grouped);
  grouped.clear();
  for (auto& [where, transfers] : posted) {
    auto& [comm, stream] = where;
    auto all = transfers;
    ncclResult_t result =
        launch(comm, stream, [all](ncclComm& c) { return transfer(c, all); });
    if (result != ncclSuccess) return result;
  }
  return ncclSuccess;
}

ncclResult_t ncclSend(
    const void* from, size_t elements, ncclDataType_t type, int peer, ncclComm_t comm,
    cudaStream_t on) {
  count(__func__);
  auto memory = static_cast<char*>(const_cast<void*>(from));
  return post(comm, on, {true, peer, memory, elements * width_of(type)});
}

ncclResult_t ncclRecv(
    void* to, size_t elements, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t on) {
  count(__func__);
  return post(comm, on, {false, peer, static_cast<char*>(to), elements * width_of(type)});
}

ncclResult_t ncclBroadcast(
    const void* from, void* to, size_t elements, ncclDataType_t type, int root, ncclComm_t comm,
    cudaStream_t on) {
  count(__func__);
  size_t bytes = elements * width_of(type);
  return launch(comm, on, [=](ncclComm& c) {
    return broadcast(c, static_cast<const char*>(from), static_cast<char*>(to), bytes, root);
  });
}

ncclResult_t ncclBcast(
    void* memory, size_t elements, ncclDataType_t type, int root, ncclComm_t comm,
    cudaStream_t on) {
  return ncclBroadcast(memory, memory, elements, type, root, comm, on);
}

// Rank 0 adds up what the others send, and broadcasts it.
ncclResult_t ncclAllReduce(
    const void* from, void* to, size_t elements, ncclDataType_t type, ncclRedOp_t operation,
    ncclComm_t comm, cudaStream_t on) {
  count(__func__);
  auto sum = adder(type);
  if (sum == nullptr || operation != ncclSum) {
    unsupported("ncclAllReduce of this type or operation");
    return ncclInvalidArgument;
  }
  size_t bytes = elements * width_of(type);
  auto source = static_cast<const char*>(from);
  auto target = static_cast<char*>(to);
  return launch(comm, on, [=](ncclComm& c) {
    if (c.rank != 0) {
      if (!transfer(c, {{true, 0, const_cast<char*>(source), bytes}})) return false;
    } else {
      std::memmove(target, source, bytes);
      std::vector<char> other(bytes);
      for (int peer = 1; peer < c.size; peer++) {
        if (!transfer(c, {{false, peer, other.data(), bytes}})) return false;
        sum(target, other.data(), elements);
      }
    }
    return broadcast(c, target, target, bytes, 0);
  });
}

ncclResult_t ncclAllGather(
    const void* from, void* to, size_t elements, ncclDataType_t type, ncclComm_t comm,
    cudaStream_t on) {
  count(__func__);
  size_t bytes = elements * width_of(type);
  auto source = static_cast<char*>(const_cast<void*>(from));
  auto target = static_cast<char*>(to);
  return launch(comm, on, [=](ncclComm& c) {
    std::memmove(target + c.rank * bytes, source, bytes);
    auto transfers = with_every_other(c, true, source, bytes);
    for (int peer = 0; peer < c.size; peer++)
      if (peer != c.rank) transfers.push_back({false, peer, target + peer * bytes, bytes});
    return transfer(c, transfers);
  });
}
