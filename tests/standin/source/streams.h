// Streams as queues with a thread each, the events between them, and captures into graphs.
#pragma once

#include "standin.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace standin {

// Guards streams, events and captures.  Locked before any other mutex of the stand-in.
std::mutex& world();

// Notified whenever a stream has got further; goes with `world()`.
std::condition_variable& moved();

// One operation in a stream: `work` runs without the lock once `ready()`, then `mark` under it.
struct Task {
  std::function<bool()> ready;
  std::function<void()> work;
  std::function<void()> mark;
};

// What a capture collects.  Streams that join it append to the one list: the order in which the
// host gave the operations is an order that respects every dependency between them.
struct Stream;
struct Capture {
  unsigned long long id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  long owner = 0;  // the thread that began it
  bool valid = true;
  bool ended = false;
  std::vector<Stream*> streams;
  std::vector<Task> tasks;
};

struct Stream {
  int device = 0;
  int priority = 0;
  std::deque<Task> queue;  // the front is under way
  std::condition_variable filled;
  bool started = false;
  bool destroyed = false;
  std::shared_ptr<Capture> capture;
};

struct Event {
  int device = 0;
  bool timed = false;
  std::uint64_t recorded = 0, reached = 0;  // how often it was recorded, and the last one passed
  std::chrono::steady_clock::time_point at;
  std::shared_ptr<Capture> capture;  // set if it was recorded in a capture
};

// The functions below are called with `world()` locked.

// The stream of a handle; the null handle is the current device's default stream.  Null if the
// handle is none.
Stream* stream_of(cudaStream_t handle);

// Gives `task` to a stream, or to the capture that the stream is in.  Blocks while the stream has
// as many operations as the driver takes (STANDIN_QUEUE), as the driver does.
void submit(std::unique_lock<std::mutex>& held, Stream* stream, Task task);

void wait_until_idle(std::unique_lock<std::mutex>& held, Stream* stream);

// Whether a call that could break a capture is refused to the calling thread.  If it is, the
// captures that it endangers are invalid from now on.
bool refused_by_capture();

}  // namespace standin
