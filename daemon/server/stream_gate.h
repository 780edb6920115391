// Who may finish a stream: it either waits for its client or works on one of its messages, and a
// shutdown wants it to end. No gRPC in here.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/container/flat_hash_set.h"
#include "storage/base/mutex.h"

namespace wavekv {

// Thread-safe. Whoever is told to finish the stream is the only one.
class StreamGate {
 public:
  // A message has arrived. False: the stream has been finished meanwhile.
  bool BeginWork();
  // The message is done: calls `wait`, which asks gRPC for the next one, and returns true. False: a
  // stop was asked for, and the caller is to finish the stream. A new stream begins at work.
  // The lock is held around `wait`, so that a stop cannot finish the stream in between; gRPC's
  // operations only start something, and never call back from inside.
  bool EndWork(const std::function<void()>& wait);
  // The message ended the stream, and the caller, at work on it, is to finish it.
  void FinishWork();
  // The client ended the stream, or went. True: the caller is to finish it.
  bool FinishWaiting();
  // A shutdown. True: the stream waits for its client, and the caller is to finish it. False: it
  // will be when its work is done.
  bool Stop();

 private:
  enum class State : uint8_t { kWaiting, kWorking, kFinished };

  Mutex mutex_;
  State state_ ABSL_GUARDED_BY(mutex_) = State::kWorking;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
};

// A stream that a shutdown can end.
class StoppableStream {
 public:
  virtual ~StoppableStream() = default;
  // Must not delete the stream before it returns.
  virtual void Stop() = 0;
};

// The open streams. Thread-safe.
class StreamSet {
 public:
  // False once StopAll was called: the caller refuses the stream.
  bool Add(StoppableStream* stream);
  // After this the set does not touch the stream any more.
  void Remove(StoppableStream* stream);
  void StopAll();

 private:
  Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_set<StoppableStream*> streams_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace wavekv
