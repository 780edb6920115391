#include "tests/client/fake_daemon.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"
#include "proto/rpc/metadata.h"
#include "proto/rpc/protocol_version.h"
#include "proto/rpc/tensor_wire.h"
#include "storage/base/check.h"
#include "storage/base/random.h"

namespace wavekv {
namespace {

using grpc::Status;
using grpc::StatusCode;

std::string Metadata(const grpc::ServerContext& context, const char* key) {
  const auto it = context.client_metadata().find(key);
  return it == context.client_metadata().end() ? ""
                                               : std::string(it->second.data(), it->second.size());
}

// A tensor of `count` floats, all `value`.
void Fill(std::vector<int64_t> shape, float value, v1::Tensor* tensor) {
  size_t count = 1;
  for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
  const std::vector<float> data(count, value);
  FillWireTensor(DType::kF32, shape, data.data(), tensor);
}

void FillEstimation(const v1::ModelShape& shape, v1::EstimateReply* reply) {
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  Fill({shape.query_head_count(), shape.value_dim()}, 0, reply->mutable_out());
  Fill({shape.query_head_count()}, kEmpty, reply->mutable_lse());
  Fill({shape.query_head_count()}, kEmpty, reply->mutable_lse_lower());
  Fill({shape.query_head_count()}, kEmpty, reply->mutable_lse_upper());
}

}  // namespace

FakeDaemon::FakeDaemon(const std::string& address, Options options)
    : options_(std::move(options)), wave_buffers_(options_.wave_buffers) {
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(static_cast<int>(options_.message_bytes_max));
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  WAVEKV_CHECK(server_ != nullptr, "the fake daemon did not start");
}

FakeDaemon::~FakeDaemon() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

void FakeDaemon::Hang(const std::string& call) {
  MutexLock lock(&mutex_);
  hung_.insert(call);
}

void FakeDaemon::Unhang(const std::string& call) {
  MutexLock lock(&mutex_);
  hung_.erase(call);
  changed_.NotifyAll();
}

void FakeDaemon::ForgetClients() {
  MutexLock lock(&mutex_);
  secrets_.clear();
}

void FakeDaemon::AddSequence(uint64_t id, uint64_t generation) {
  MutexLock lock(&mutex_);
  sequences_[id].generation = generation;
}

std::string FakeDaemon::last_authorization() const {
  MutexLock lock(&mutex_);
  return authorization_;
}

void FakeDaemon::SetWaveBuffers(std::vector<v1::WaveBufferInfo> buffers) {
  MutexLock lock(&mutex_);
  wave_buffers_ = std::move(buffers);
}

uint64_t FakeDaemon::CallCount(const std::string& call) const {
  MutexLock lock(&mutex_);
  const auto it = calls_.find(call);
  return it == calls_.end() ? 0 : it->second;
}

bool FakeDaemon::WaitForCalls(const std::string& call, uint64_t count,
                              std::chrono::milliseconds timeout) const {
  const auto until = std::chrono::steady_clock::now() + timeout;
  MutexLock lock(&mutex_);
  while (true) {
    const auto it = calls_.find(call);
    if (it != calls_.end() && it->second >= count) return true;
    const auto left = until - std::chrono::steady_clock::now();
    if (left <= std::chrono::steady_clock::duration::zero()) return false;
    changed_.WaitFor(&mutex_, left);
  }
}

std::vector<v1::InsertRequest> FakeDaemon::inserts() const {
  MutexLock lock(&mutex_);
  return inserts_;
}

std::vector<v1::QueryRequest> FakeDaemon::queries() const {
  MutexLock lock(&mutex_);
  return queries_;
}

std::set<uint64_t> FakeDaemon::live_sequences() const {
  MutexLock lock(&mutex_);
  std::set<uint64_t> ids;
  for (const auto& [id, sequence] : sequences_) ids.insert(id);
  return ids;
}

Status FakeDaemon::Enter(const std::string& call, Context* context, bool check_identity) {
  MutexLock lock(&mutex_);
  ++calls_[call];
  changed_.NotifyAll();
  while (hung_.contains(call) && !stopping_ && !context->IsCancelled()) {
    changed_.WaitFor(&mutex_, std::chrono::milliseconds(5));
  }
  if (stopping_) return Status(StatusCode::UNAVAILABLE, "shutting down");
  if (!check_identity) return Status::OK;
  if (Metadata(*context, kEpochKey) != absl::StrCat(options_.epoch)) {
    context->AddTrailingMetadata(kStaleEpochKey, absl::StrCat(options_.epoch));
    return Status(StatusCode::FAILED_PRECONDITION, "stale epoch");
  }
  if (!secrets_.contains(Metadata(*context, kSecretKey))) {
    return Status(StatusCode::UNAUTHENTICATED, "unknown secret");
  }
  return Status::OK;
}

Status FakeDaemon::Find(const v1::SequenceRef& ref, FakeSequence* sequence) const {
  MutexLock lock(&mutex_);
  const auto it = sequences_.find(ref.sequence_id());
  if (it == sequences_.end()) {
    return Status(StatusCode::NOT_FOUND, absl::StrCat("sequence ", ref.sequence_id()));
  }
  if (ref.generation() != it->second.generation) {
    return Status(
        StatusCode::FAILED_PRECONDITION,
        absl::StrCat("generation ", ref.generation(), ", expected ", it->second.generation));
  }
  *sequence = it->second;
  return Status::OK;
}

Status NotKnown() { return Status(StatusCode::UNIMPLEMENTED, ""); }

#define FAKE_RETURN_IF_ERROR(expr)             \
  do {                                         \
    const Status fake_status = (expr);         \
    if (!fake_status.ok()) return fake_status; \
  } while (false)

Status FakeDaemon::Attach(Context* context, const v1::AttachRequest* request,
                          v1::AttachReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("Attach", context, /*check_identity=*/false));
  {
    MutexLock lock(&mutex_);
    std::string secret = absl::StrCat("secret ", options_.epoch, " ", calls_["Attach"]);
    secret.resize(kSecretBytes, '.');
    secrets_.insert(secret);
    authorization_ = Metadata(*context, kAuthorizationKey);
    reply->set_secret(secret);
    reply->mutable_wave_buffers()->Assign(wave_buffers_.begin(), wave_buffers_.end());
  }
  reply->set_protocol_version(kProtocolVersionMax);
  reply->set_epoch(options_.epoch);
  reply->set_lease_ms(request->lease_ms() == 0 ? options_.lease_ms : request->lease_ms());
  reply->set_tenant("uid:1000");
  reply->set_daemon_version("fake");
  reply->mutable_limits()->set_message_bytes_max(options_.message_bytes_max);
  reply->mutable_limits()->set_batch_max(options_.batch_max);
  return on_attach ? on_attach(*request, reply) : Status::OK;
}

Status FakeDaemon::Heartbeat(Context* context, const v1::HeartbeatRequest* request,
                             v1::HeartbeatReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("Heartbeat", context));
  if (!request->with_wave_buffers()) return Status::OK;
  MutexLock lock(&mutex_);
  reply->mutable_wave_buffers()->Assign(wave_buffers_.begin(), wave_buffers_.end());
  return Status::OK;
}

Status FakeDaemon::Detach(Context* context, const v1::DetachRequest*, v1::DetachReply*) {
  return Enter("Detach", context);
}

Status FakeDaemon::CreateSequence(Context* context, const v1::CreateSequenceRequest* request,
                                  v1::CreateSequenceReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("CreateSequence", context));
  MutexLock lock(&mutex_);
  const uint64_t id = (options_.epoch << 32) + ++last_id_;
  sequences_[id].shape = request->shape();
  reply->set_sequence_id(id);
  reply->set_generation(1);
  return Status::OK;
}

Status FakeDaemon::Insert(Context* context, Reader<v1::InsertRequest>* reader,
                          v1::InsertReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("Insert", context));
  v1::InsertRequest request;
  uint64_t messages = 0;
  while (reader->Read(&request)) {
    FakeSequence sequence;
    FAKE_RETURN_IF_ERROR(Find(request.sequence(), &sequence));
    if (on_insert) FAKE_RETURN_IF_ERROR(on_insert(request));
    const uint64_t tokens = static_cast<uint64_t>(
        request.keys().shape(request.keys().layout() == v1::LAYOUT_HND ? 2 : 1));
    MutexLock lock(&mutex_);
    inserts_.push_back(request);
    FakeSequence& stored = sequences_[request.sequence().sequence_id()];
    stored.token_count = std::max(stored.token_count, request.first_position() + tokens);
    reply->set_generation(stored.generation);
    reply->set_token_count(stored.token_count);
    reply->set_inserted_messages(++messages);
  }
  return Status::OK;
}

Status FakeDaemon::BuildIndex(Context* context, const v1::BuildIndexRequest* request,
                              grpc::ServerWriter<v1::BuildIndexProgress>* writer) {
  FAKE_RETURN_IF_ERROR(Enter("BuildIndex", context));
  FakeSequence sequence;
  FAKE_RETURN_IF_ERROR(Find(request->sequence(), &sequence));
  for (const v1::BuildIndexProgress& progress : build_progress) writer->Write(progress);
  return Status::OK;
}

Status FakeDaemon::Query(Context* context, const v1::QueryRequest* request, v1::QueryReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("Query", context));
  FakeSequence sequence;
  FAKE_RETURN_IF_ERROR(Find(request->sequence(), &sequence));
  {
    MutexLock lock(&mutex_);
    queries_.push_back(*request);
    reply->set_step(++last_step_);
  }
  reply->set_generation(sequence.generation);
  reply->set_token_count(sequence.token_count);
  for (uint32_t head = 0; head < sequence.shape.kv_head_count(); ++head) {
    reply->add_heads()->set_kv_head(head);
  }
  FillEstimation(sequence.shape, reply->mutable_estimation());
  return on_query ? on_query(*request, reply) : Status::OK;
}

Status FakeDaemon::Estimate(Context* context, const v1::EstimateRequest* request,
                            v1::EstimateReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("Estimate", context));
  FakeSequence sequence;
  FAKE_RETURN_IF_ERROR(Find(request->sequence(), &sequence));
  reply->set_generation(sequence.generation);
  FillEstimation(sequence.shape, reply);
  return Status::OK;
}

Status FakeDaemon::Attend(Context* context, const v1::AttendRequest* request,
                          v1::AttendReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("Attend", context));
  for (const v1::AttendItem& item : request->items()) {
    v1::AttendResult* const result = reply->add_results();
    FakeSequence sequence;
    const Status status = Find(item.sequence(), &sequence);
    if (!status.ok()) {
      result->set_error_code(static_cast<uint32_t>(status.error_code()));
      result->set_error_message(status.error_message());
      continue;
    }
    result->set_generation(sequence.generation);
    result->set_token_count(item.has_append_keys() ? item.append_position() + 1
                                                   : sequence.token_count);
    // So that a test sees whose answer it got: id and layer.
    Fill({sequence.shape.query_head_count(), sequence.shape.value_dim()},
         static_cast<float>(item.sequence().sequence_id() & 0xffffffffu), result->mutable_out());
    Fill({sequence.shape.query_head_count()}, static_cast<float>(item.layer()),
         result->mutable_lse());
  }
  return on_attend ? on_attend(*request, reply) : Status::OK;
}

Status FakeDaemon::ForkSequence(Context* context, const v1::ForkSequenceRequest* request,
                                v1::ForkSequenceReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("ForkSequence", context));
  FakeSequence sequence;
  FAKE_RETURN_IF_ERROR(Find(request->sequence(), &sequence));
  MutexLock lock(&mutex_);
  const uint64_t id = (options_.epoch << 32) + ++last_id_;
  sequence.generation = 1;
  if (request->token_count() != 0) sequence.token_count = request->token_count();
  sequences_[id] = sequence;
  reply->set_sequence_id(id);
  reply->set_generation(1);
  reply->set_token_count(sequence.token_count);
  return Status::OK;
}

Status FakeDaemon::TruncateSequence(Context* context, const v1::TruncateSequenceRequest* request,
                                    v1::TruncateSequenceReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("TruncateSequence", context));
  FakeSequence sequence;
  FAKE_RETURN_IF_ERROR(Find(request->sequence(), &sequence));
  MutexLock lock(&mutex_);
  FakeSequence& stored = sequences_[request->sequence().sequence_id()];
  ++stored.generation;
  stored.token_count = std::min(stored.token_count, request->token_count());
  reply->set_generation(stored.generation);
  reply->set_token_count(stored.token_count);
  return Status::OK;
}

Status FakeDaemon::DropSequence(Context* context, const v1::DropSequenceRequest* request,
                                v1::DropSequenceReply*) {
  FAKE_RETURN_IF_ERROR(Enter("DropSequence", context));
  FakeSequence sequence;
  FAKE_RETURN_IF_ERROR(Find(request->sequence(), &sequence));
  MutexLock lock(&mutex_);
  sequences_.erase(request->sequence().sequence_id());
  return Status::OK;
}

Status FakeDaemon::Pin(Context* context, const v1::PinRequest* request, v1::PinReply*) {
  FAKE_RETURN_IF_ERROR(Enter("Pin", context));
  FakeSequence sequence;
  return Find(request->sequence(), &sequence);
}

Status FakeDaemon::SetTtl(Context* context, const v1::SetTtlRequest* request, v1::SetTtlReply*) {
  FAKE_RETURN_IF_ERROR(Enter("SetTtl", context));
  FakeSequence sequence;
  return Find(request->sequence(), &sequence);
}

Status FakeDaemon::PlanIndex(Context* context, const v1::PlanIndexRequest* request,
                             v1::PlanIndexReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("PlanIndex", context));
  return on_plan_index ? on_plan_index(*request, reply) : NotKnown();
}

Status FakeDaemon::GiveLabels(Context* context, const v1::GiveLabelsRequest* request,
                              v1::GiveLabelsReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("GiveLabels", context));
  return on_give_labels ? on_give_labels(*request, reply) : NotKnown();
}

Status FakeDaemon::AttachResident(Context* context, const v1::AttachResidentRequest* request,
                                  v1::AttachResidentReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("AttachResident", context));
  return on_attach_resident ? on_attach_resident(*request, reply) : NotKnown();
}

Status FakeDaemon::ResidentStatus(Context* context, const v1::ResidentStatusRequest* request,
                                  v1::ResidentStatusReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("ResidentStatus", context));
  return on_resident_status ? on_resident_status(*request, reply) : NotKnown();
}

Status FakeDaemon::DetachResident(Context* context, const v1::DetachResidentRequest* request,
                                  v1::DetachResidentReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("DetachResident", context));
  return on_detach_resident ? on_detach_resident(*request, reply) : NotKnown();
}

Status FakeDaemon::GetStats(Context* context, const v1::GetStatsRequest*,
                            v1::GetStatsReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("GetStats", context));
  reply->set_daemon_version("fake");
  reply->set_epoch(options_.epoch);
  return on_stats ? on_stats(reply) : Status::OK;
}

Status FakeDaemon::ListSequences(Context* context, const v1::ListSequencesRequest* request,
                                 v1::ListSequencesReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("ListSequences", context));
  return on_list ? on_list(*request, reply) : Status::OK;
}

Status FakeDaemon::DescribeIndex(Context* context, const v1::DescribeIndexRequest* request,
                                 v1::DescribeIndexReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("DescribeIndex", context));
  return on_describe ? on_describe(*request, reply) : Status::OK;
}

Status FakeDaemon::Explain(Context* context, const v1::ExplainRequest* request,
                           v1::ExplainReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("Explain", context));
  return on_explain ? on_explain(*request, reply) : Status::OK;
}

Status FakeDaemon::SampleRecall(Context* context, const v1::SampleRecallRequest* request,
                                v1::SampleRecallReply* reply) {
  FAKE_RETURN_IF_ERROR(Enter("SampleRecall", context));
  return on_recall ? on_recall(*request, reply) : Status::OK;
}

}  // namespace wavekv
