// Messages between the ranks of a communicator: the part of NCCL below its calls.
#pragma once

#include "standin.h"

#include <atomic>
#include <cstdint>
#include <vector>

// A communicator.  Each ordered pair of ranks has a socket of its own, so that no direction can
// hold up another.
struct ncclComm {
  int rank = 0;
  int size = 1;
  std::vector<int> to, from;  // sockets by peer: those it sends on, those it receives on
  std::atomic<bool> aborted{false};
  std::atomic<int> running{0};  // kernels given to a stream and not over
  std::atomic<int> error{ncclSuccess};
};

namespace standin {

struct Transfer {
  bool sends;
  int peer;
  char* memory;
  size_t bytes;
};

// A name under which ranks find each other; unique on this machine.
ncclUniqueId new_meeting();

// Connects `comm` with every other rank that has the same `meeting`.  Blocks until all are there.
bool connect_all(ncclComm& comm, const ncclUniqueId& meeting);

// Does the transfers at the same time, those with one peer and direction in order.  A send is over
// when its receiver has all of it.  Returns false if the communicator was aborted before; like a
// kernel, it waits for a peer that is gone until then.
bool transfer(ncclComm& comm, const std::vector<Transfer>& transfers);

}  // namespace standin
