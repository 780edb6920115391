#include "daemon/server/stream_gate.h"

#include "storage/base/check.h"

namespace wavekv {

bool StreamGate::BeginWork() {
  MutexLock lock(&mutex_);
  if (state_ == State::kFinished) return false;
  WAVEKV_CHECK(state_ == State::kWaiting, "two messages of a stream at once");
  state_ = State::kWorking;
  return true;
}

bool StreamGate::EndWork(const std::function<void()>& wait) {
  MutexLock lock(&mutex_);
  WAVEKV_CHECK(state_ == State::kWorking, "work of a stream ended twice");
  state_ = stop_ ? State::kFinished : State::kWaiting;
  if (!stop_) wait();
  return !stop_;
}

void StreamGate::FinishWork() {
  MutexLock lock(&mutex_);
  WAVEKV_CHECK(state_ == State::kWorking, "a stream finished twice");
  state_ = State::kFinished;
}

bool StreamGate::FinishWaiting() {
  MutexLock lock(&mutex_);
  if (state_ == State::kFinished) return false;
  WAVEKV_CHECK(state_ == State::kWaiting, "a stream ended while a message was worked on");
  state_ = State::kFinished;
  return true;
}

bool StreamGate::Stop() {
  MutexLock lock(&mutex_);
  stop_ = true;
  if (state_ != State::kWaiting) return false;
  state_ = State::kFinished;
  return true;
}

bool StreamSet::Add(StoppableStream* stream) {
  MutexLock lock(&mutex_);
  if (stopped_) return false;
  streams_.insert(stream);
  return true;
}

void StreamSet::Remove(StoppableStream* stream) {
  MutexLock lock(&mutex_);
  streams_.erase(stream);
}

void StreamSet::StopAll() {
  // The lock is held while calling out, as it keeps the streams alive: a stream removes itself
  // when it is done, in another thread, and waits for us.
  MutexLock lock(&mutex_);
  stopped_ = true;
  for (StoppableStream* stream : streams_) stream->Stop();
}

}  // namespace wavekv
