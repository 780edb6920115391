#include "tests/integration/decode_peer.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "storage/base/status_macros.h"
#include "tests/gpu/driver/use_fake_cuda.h"
#include "tests/integration/device_engine.h"
#include "tests/integration/resident_engine.h"

namespace wavekv::integration {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kDeadline(10);
constexpr std::chrono::seconds kPatience(60);
constexpr uint32_t kRetrieveClusters = 2048;  // All that there are: a step is exact.
constexpr uint64_t kTokensPerQuestion = 16;   // How often the daemon is asked whether all is well.

struct Error {
  double out = 0;  // Relative.
  double lse = 0;
};
constexpr Error kReferenceTolerance = {1e-5, 1e-5};  // Float64, but for the result.
constexpr Error kDeviceTolerance = {5e-3, 2e-3};     // As in the kernels' own test.

void Say(const std::string& line) {
  std::fputs(line.c_str(), stdout);
  std::fflush(stdout);
}

class Peer {
 public:
  Peer(std::string address, uint64_t seed)
      : address_(std::move(address)),
        seed_(seed),
        fake_(UseFakeCuda()),
        tolerance_(fake_ ? kReferenceTolerance : kDeviceTolerance),
        cache_(HostCache::Random(ResidentShape(), kPeerTokens, seed)) {}

  // Of all answers so far, the largest error.
  const Error& worst() const { return worst_; }

  // DataLoss: an answer was wrong.
  absl::Status Run() {
    WAVEKV_ASSIGN_OR_RETURN(
        engine_, fake_ ? MakeReferenceEngine(ResidentShape(), kPeerTokensMax, kRetrieveClusters)
                       : MakeDeviceEngine(ResidentShape(), kPeerTokensMax, kRetrieveClusters));
    WAVEKV_ASSIGN_OR_RETURN(
        session_, client::Session::Connect(
                      {.address = address_, .client_name = "decode_peer", .deadline = kDeadline}));
    Say(kConnected);
    WAVEKV_ASSIGN_OR_RETURN(
        sequence_, CreateResidentSequence(*session_, &cache_, kPeerFirstToken, kPeerTokensMax));
    Say(kBuilt);
    WAVEKV_RETURN_IF_ERROR(Attach());
    Say(kAttached);
    for (uint64_t position = kPeerFirstToken; position < kPeerTokens; ++position) {
      WAVEKV_RETURN_IF_ERROR(Decode(position));
      Say(TokenLine(position));
    }
    WAVEKV_RETURN_IF_ERROR(sequence_->DetachResident());
    return CheckStored();
  }

 private:
  // Waits, as an engine may, for a wavebufferd that is on its way back, and for the memory of an
  // engine whose end is being noticed.
  absl::Status Attach() {
    const auto end = Clock::now() + kPatience;
    absl::Status status;
    do {
      status = engine_->Attach(sequence_.get(), ResidentRegionOptions());
    } while ((absl::IsUnavailable(status) || absl::IsResourceExhausted(status)) &&
             Clock::now() < end);
    return status;
  }

  absl::Status Decode(uint64_t position) {
    const ModelShape shape = ResidentShape();
    std::vector<float> queries = RandomQueries(shape, seed_ + position);
    std::vector<std::byte> bits(queries.size() * DTypeBytes(shape.dtype));
    ConvertFromFloat(shape.dtype, queries.data(), queries.size(), bits.data());
    ConvertToFloat(shape.dtype, bits.data(), queries.size(), queries.data());
    std::vector<std::byte> all;  // The same ones for each layer.
    for (uint32_t layer = 0; layer < shape.layer_count; ++layer) {
      all.insert(all.end(), bits.begin(), bits.end());
    }
    const HostCache::Chunk token = cache_.Slice(position, 1, 0, shape.layer_count);
    WAVEKV_ASSIGN_OR_RETURN(
        const TokenAnswer answer,
        engine_->Step(
            {.queries = all,
             .keys = {static_cast<const std::byte*>(token.keys.data), token.keys.bytes()},
             .values = {static_cast<const std::byte*>(token.values.data), token.values.bytes()}}));
    WAVEKV_RETURN_IF_ERROR(CheckAnswer(answer, queries, position + 1));
    if (position % kTokensPerQuestion != 0) return absl::OkStatus();
    WAVEKV_ASSIGN_OR_RETURN(const client::ResidentState state, sequence_->ResidentStatus());
    return state.attached;
  }

  absl::Status CheckAnswer(const TokenAnswer& answer, std::span<const float> queries,
                           uint64_t count) {
    for (uint32_t layer = 0; layer < ResidentShape().layer_count; ++layer) {
      const HostCache::Exact exact = cache_.Attend(layer, queries, count);
      const std::span<const float> out(answer.out.data() + layer * exact.out.size(),
                                       exact.out.size());
      double lse_error = 0;
      for (size_t head = 0; head < exact.lse.size(); ++head) {
        const double found = answer.lse[layer * exact.lse.size() + head];
        lse_error = std::max(lse_error, std::abs(found - exact.lse[head]));
      }
      const double error = RelativeError(out, exact.out);
      worst_ = {std::max(worst_.out, error), std::max(worst_.lse, lse_error)};
      // So that a NaN fails, too.
      if (error < tolerance_.out && lse_error < tolerance_.lse) continue;
      return absl::DataLossError(absl::StrCat("layer ", layer, " of ", count, " tokens: error ",
                                              error, ", of the log mass ", lse_error));
    }
    return absl::OkStatus();
  }

  // By the daemon's own exact attention.
  absl::Status CheckStored() {
    const ModelShape shape = ResidentShape();
    const std::vector<float> queries = RandomQueries(shape, seed_);
    for (uint32_t layer = 0; layer < shape.layer_count; ++layer) {
      WAVEKV_ASSIGN_OR_RETURN(
          const client::Attention stored,
          sequence_->Attend(layer, QueryTensor(shape, queries), {.exact = true}));
      const double error =
          RelativeError(stored.out, cache_.Attend(layer, queries, kPeerTokens).out);
      if (stored.token_count == kPeerTokens && error < 1e-4) continue;
      return absl::DataLossError(absl::StrCat("layer ", layer, " has stored ", stored.token_count,
                                              " of ", kPeerTokens, " tokens, error ", error));
    }
    return absl::OkStatus();
  }

  const std::string address_;
  const uint64_t seed_;
  const bool fake_;
  const Error tolerance_;
  Error worst_;
  HostCache cache_;
  std::unique_ptr<client::Session> session_;
  std::unique_ptr<client::Sequence> sequence_;
  std::unique_ptr<TokenEngine> engine_;
};

PeerExit ExitOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kPeerDecoded;
    case absl::StatusCode::kDataLoss:
      return kPeerWrong;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAborted:
      return kPeerAway;
    default:
      return kPeerFailed;
  }
}

}  // namespace
}  // namespace wavekv::integration

int main(int argc, char** argv) {
  using namespace wavekv::integration;
  if (argc != 3) {
    std::fputs("usage: decode_peer ADDRESS SEED\n", stderr);
    return kPeerFailed;
  }
  Peer peer(argv[1], std::strtoull(argv[2], nullptr, 10));
  const absl::Status status = peer.Run();
  std::fprintf(stderr, "decode_peer: %s; largest error %.2g, of the log mass %.2g\n",
               status.ToString().c_str(), peer.worst().out, peer.worst().lse);
  return ExitOf(status);
}
