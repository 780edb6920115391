// A WaveKV service in this process, for the SDK's own tests: it keeps no vectors, checks identity
// as the contract has it, records what it was sent, and misbehaves on request.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "grpcpp/server.h"
#include "storage/base/mutex.h"
#include "tests/temp_dir.h"
#include "wavekv/v1/wavekv.grpc.pb.h"

namespace wavekv {

class FakeDaemon final : public v1::WaveKV::Service {
 public:
  struct Options {
    uint64_t epoch = 7;
    uint64_t lease_ms = 60000;
    uint64_t message_bytes_max = 1 << 20;
    uint32_t batch_max = 4;
    std::vector<v1::WaveBufferInfo> wave_buffers;
  };

  FakeDaemon(const std::string& address, Options options);
  ~FakeDaemon() override;

  // Calls of this name (as in the contract) do not return until they are cancelled or the daemon
  // is stopped.
  void Hang(const std::string& call);
  void Unhang(const std::string& call);
  // Every lease is lost: secrets are unknown from now on.
  void ForgetClients();
  // A sequence that somebody else made.
  void AddSequence(uint64_t id, uint64_t generation);
  // Answers of AttachReply.wave_buffers and HeartbeatReply.wave_buffers.
  void SetWaveBuffers(std::vector<v1::WaveBufferInfo> buffers);
  // How many calls of this name came in. WaitForCalls: false when `timeout` passed first.
  uint64_t CallCount(const std::string& call) const;
  bool WaitForCalls(const std::string& call, uint64_t count,
                    std::chrono::milliseconds timeout = std::chrono::seconds(20)) const;
  // Messages of Insert, in order.
  std::vector<v1::InsertRequest> inserts() const;
  std::vector<v1::QueryRequest> queries() const;
  std::set<uint64_t> live_sequences() const;
  // The "authorization" metadata of the last Attach.
  std::string last_authorization() const;

  // Set before the calls that should see them. Each may change a reply or replace the status.
  std::function<grpc::Status(const v1::InsertRequest&)> on_insert;
  std::function<grpc::Status(const v1::AttachRequest&, v1::AttachReply*)> on_attach;
  std::function<grpc::Status(const v1::AttendRequest&, v1::AttendReply*)> on_attend;
  std::function<grpc::Status(const v1::QueryRequest&, v1::QueryReply*)> on_query;
  std::function<grpc::Status(v1::GetStatsReply*)> on_stats;
  std::function<grpc::Status(const v1::ListSequencesRequest&, v1::ListSequencesReply*)> on_list;
  std::function<grpc::Status(const v1::DescribeIndexRequest&, v1::DescribeIndexReply*)> on_describe;
  std::function<grpc::Status(const v1::ExplainRequest&, v1::ExplainReply*)> on_explain;
  std::function<grpc::Status(const v1::SampleRecallRequest&, v1::SampleRecallReply*)> on_recall;
  // Not set: UNIMPLEMENTED, as of an older daemon.
  std::function<grpc::Status(const v1::PlanIndexRequest&, v1::PlanIndexReply*)> on_plan_index;
  std::function<grpc::Status(const v1::GiveLabelsRequest&, v1::GiveLabelsReply*)> on_give_labels;
  std::function<grpc::Status(const v1::AttachResidentRequest&, v1::AttachResidentReply*)>
      on_attach_resident;
  std::function<grpc::Status(const v1::ResidentStatusRequest&, v1::ResidentStatusReply*)>
      on_resident_status;
  std::function<grpc::Status(const v1::DetachResidentRequest&, v1::DetachResidentReply*)>
      on_detach_resident;
  std::vector<v1::BuildIndexProgress> build_progress;

 private:
  template <class T>
  using Reader = grpc::ServerReader<T>;
  using Context = grpc::ServerContext;

  grpc::Status Attach(Context* context, const v1::AttachRequest* request,
                      v1::AttachReply* reply) override;
  grpc::Status Heartbeat(Context* context, const v1::HeartbeatRequest* request,
                         v1::HeartbeatReply* reply) override;
  grpc::Status Detach(Context* context, const v1::DetachRequest* request,
                      v1::DetachReply* reply) override;
  grpc::Status CreateSequence(Context* context, const v1::CreateSequenceRequest* request,
                              v1::CreateSequenceReply* reply) override;
  grpc::Status Insert(Context* context, Reader<v1::InsertRequest>* reader,
                      v1::InsertReply* reply) override;
  grpc::Status BuildIndex(Context* context, const v1::BuildIndexRequest* request,
                          grpc::ServerWriter<v1::BuildIndexProgress>* writer) override;
  grpc::Status PlanIndex(Context* context, const v1::PlanIndexRequest* request,
                         v1::PlanIndexReply* reply) override;
  grpc::Status GiveLabels(Context* context, const v1::GiveLabelsRequest* request,
                          v1::GiveLabelsReply* reply) override;
  grpc::Status Query(Context* context, const v1::QueryRequest* request,
                     v1::QueryReply* reply) override;
  grpc::Status Estimate(Context* context, const v1::EstimateRequest* request,
                        v1::EstimateReply* reply) override;
  grpc::Status Attend(Context* context, const v1::AttendRequest* request,
                      v1::AttendReply* reply) override;
  grpc::Status ForkSequence(Context* context, const v1::ForkSequenceRequest* request,
                            v1::ForkSequenceReply* reply) override;
  grpc::Status TruncateSequence(Context* context, const v1::TruncateSequenceRequest* request,
                                v1::TruncateSequenceReply* reply) override;
  grpc::Status DropSequence(Context* context, const v1::DropSequenceRequest* request,
                            v1::DropSequenceReply* reply) override;
  grpc::Status Pin(Context* context, const v1::PinRequest* request, v1::PinReply* reply) override;
  grpc::Status SetTtl(Context* context, const v1::SetTtlRequest* request,
                      v1::SetTtlReply* reply) override;
  grpc::Status AttachResident(Context* context, const v1::AttachResidentRequest* request,
                              v1::AttachResidentReply* reply) override;
  grpc::Status ResidentStatus(Context* context, const v1::ResidentStatusRequest* request,
                              v1::ResidentStatusReply* reply) override;
  grpc::Status DetachResident(Context* context, const v1::DetachResidentRequest* request,
                              v1::DetachResidentReply* reply) override;
  grpc::Status GetStats(Context* context, const v1::GetStatsRequest* request,
                        v1::GetStatsReply* reply) override;
  grpc::Status ListSequences(Context* context, const v1::ListSequencesRequest* request,
                             v1::ListSequencesReply* reply) override;
  grpc::Status DescribeIndex(Context* context, const v1::DescribeIndexRequest* request,
                             v1::DescribeIndexReply* reply) override;
  grpc::Status Explain(Context* context, const v1::ExplainRequest* request,
                       v1::ExplainReply* reply) override;
  grpc::Status SampleRecall(Context* context, const v1::SampleRecallRequest* request,
                            v1::SampleRecallReply* reply) override;

  struct FakeSequence {
    uint64_t generation = 1;
    uint64_t token_count = 0;
    v1::ModelShape shape;
  };

  // Counts the call, checks secret and epoch, and hangs when asked to.
  grpc::Status Enter(const std::string& call, Context* context, bool check_identity = true);
  // A copy of the sequence, or NOT_FOUND, or FAILED_PRECONDITION for another generation.
  grpc::Status Find(const v1::SequenceRef& ref, FakeSequence* sequence) const;

  const Options options_;
  mutable Mutex mutex_;
  mutable CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_step_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string authorization_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> secrets_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> hung_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, uint64_t> calls_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, FakeSequence> sequences_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::InsertRequest> inserts_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::QueryRequest> queries_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::WaveBufferInfo> wave_buffers_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace wavekv
