#include "transfers.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>

namespace standin {
namespace {

// Rank `rank` listens here.  The name is in Linux's abstract namespace: no file stays behind.
socklen_t address(const ncclUniqueId& meeting, int rank, sockaddr_un& out) {
  std::memset(&out, 0, sizeof out);
  out.sun_family = AF_UNIX;
  int length = std::snprintf(
      out.sun_path + 1, sizeof out.sun_path - 1, "%s/%d", meeting.internal, rank);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

// What a rank says first on a connection that it opened.
struct Hello {
  int rank;
  bool sends;  // whether the opening rank is the one that sends on it
};

int open_to(const ncclUniqueId& meeting, int peer, Hello hello) {
  sockaddr_un at;
  socklen_t length = address(meeting, peer, at);
  int made = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  // The peer may not have come yet.
  while (connect(made, reinterpret_cast<sockaddr*>(&at), length) != 0) usleep(2000);
  send(made, &hello, sizeof hello, MSG_NOSIGNAL);
  return made;
}

enum class Progress { none, some, lost };

// One transfer under way.  The receiver grants it, then comes the number of bytes, then the bytes.
class Flow {
 public:
  Flow(const Transfer& transfer, int socket)
      : transfer_(transfer), socket_(socket), announced_(transfer.bytes) {}

  bool over() const { return stage_ == Stage::data && done_ == transfer_.bytes; }

  pollfd interest() const {
    bool writes = transfer_.sends ? stage_ != Stage::grant : stage_ == Stage::grant;
    return {socket_, static_cast<short>(writes ? POLLOUT : POLLIN), 0};
  }

  Progress advance() {
    switch (stage_) {
      case Stage::grant: return part(&grant_, sizeof grant_, !transfer_.sends, Stage::size);
      case Stage::size: return part(&announced_, sizeof announced_, transfer_.sends, Stage::data);
      default: return part(transfer_.memory, transfer_.bytes, transfer_.sends, Stage::data);
    }
  }

  // NCCL does not notice this; it hangs, or writes where it should not.
  bool sizes_differ() const { return stage_ == Stage::data && announced_ != transfer_.bytes; }

 private:
  enum class Stage { grant, size, data };

  Progress part(void* memory, size_t bytes, bool writes, Stage next) {
    char* at = static_cast<char*>(memory) + done_;
    size_t rest = bytes - done_;
    ssize_t moved = writes ? send(socket_, at, rest, MSG_NOSIGNAL | MSG_DONTWAIT)
                           : recv(socket_, at, rest, MSG_DONTWAIT);
    if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return Progress::none;
    if (moved <= 0) return Progress::lost;
    done_ += static_cast<size_t>(moved);
    if (done_ == bytes && stage_ != next) {
      stage_ = next;
      done_ = 0;
    }
    return Progress::some;
  }

  const Transfer transfer_;
  const int socket_;
  Stage stage_ = Stage::grant;
  size_t done_ = 0;
  char grant_ = 'g';
  std::uint64_t announced_;
};

using Flows = std::map<int, std::deque<Flow>>;  // by socket

Flows flows_of(const ncclComm& comm, const std::vector<Transfer>& transfers) {
  Flows flows;
  for (auto& each : transfers) {
    int socket = each.sends ? comm.to[each.peer] : comm.from[each.peer];
    flows[socket].emplace_back(each, socket);
  }
  return flows;
}

// As a kernel that spins for a peer which does not come.
bool hang(ncclComm& comm) {
  while (!comm.aborted) usleep(2000);
  return false;
}

}  // namespace

ncclUniqueId new_meeting() {
  static std::atomic<int> number{0};
  auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  ncclUniqueId id;
  std::memset(&id, 0, sizeof id);
  std::snprintf(id.internal, sizeof id.internal, "standin-%d-%d-%llx", getpid(), number++,
                static_cast<unsigned long long>(now));
  return id;
}

bool connect_all(ncclComm& comm, const ncclUniqueId& meeting) {
  comm.to.assign(comm.size, -1);
  comm.from.assign(comm.size, -1);
  int self[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, self) != 0) return false;
  comm.to[comm.rank] = self[0];
  comm.from[comm.rank] = self[1];

  // Each listens to those of higher rank and opens connections to those of lower rank.
  int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un at;
  socklen_t length = address(meeting, comm.rank, at);
  if (bind(listener, reinterpret_cast<sockaddr*>(&at), length) != 0) return false;
  if (listen(listener, 2 * comm.size) != 0) return false;
  for (int peer = 0; peer < comm.rank; peer++) {
    comm.to[peer] = open_to(meeting, peer, {comm.rank, true});
    comm.from[peer] = open_to(meeting, peer, {comm.rank, false});
  }
  for (int left = 2 * (comm.size - 1 - comm.rank); left > 0; left--) {
    int made = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    Hello hello;
    if (made < 0 || recv(made, &hello, sizeof hello, MSG_WAITALL) != sizeof hello) return false;
    (hello.sends ? comm.from : comm.to)[hello.rank] = made;
  }
  close(listener);
  return true;
}

bool transfer(ncclComm& comm, const std::vector<Transfer>& transfers) {
  Flows flows = flows_of(comm, transfers);
  while (!flows.empty()) {
    if (comm.aborted) return false;
    bool advanced = false;
    std::vector<pollfd> interests;
    for (auto at = flows.begin(); at != flows.end();) {
      auto& [socket, queue] = *at;
      Flow& flow = queue.front();
      if (!flow.over()) {
        Progress progress = flow.advance();
        if (progress == Progress::lost) {
          // Over a network NCCL learns that a peer is gone; over NVLink and shared memory not.
          if (setting("STANDIN_REMOTE_ERRORS", 0)) comm.error = ncclRemoteError;
          return hang(comm);
        }
        if (flow.sizes_differ()) {
          std::fprintf(stderr, "stand-in: a send and its receive differ in size\n");
          comm.error = ncclInvalidArgument;
          return hang(comm);
        }
        advanced |= progress == Progress::some;
      }
      if (flow.over()) queue.pop_front();
      if (!queue.empty()) interests.push_back(queue.front().interest());
      at = queue.empty() ? flows.erase(at) : std::next(at);
    }
    // Short, since an abort does not wake it.
    if (!advanced && !interests.empty()) poll(interests.data(), interests.size(), 20);
  }
  return true;
}

}  // namespace standin
