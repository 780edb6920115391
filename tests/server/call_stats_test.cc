// The list of RPCs is that of the proto, and calls are counted by it.

#include "daemon/server/call_stats.h"

#include "google/protobuf/descriptor.h"
#include "gtest/gtest.h"
#include "wavekv/v1/wavekv.pb.h"

namespace wavekv {
namespace {

TEST(RpcTest, NamesAreThoseOfTheProto) {
  const google::protobuf::ServiceDescriptor* service =
      v1::AttachRequest::descriptor()->file()->FindServiceByName("WaveKV");
  ASSERT_NE(service, nullptr);
  ASSERT_EQ(static_cast<size_t>(service->method_count()), kRpcCount);
  for (int i = 0; i < service->method_count(); ++i) {
    EXPECT_EQ(service->method(i)->name(), RpcName(static_cast<Rpc>(i)));
  }
}

TEST(CallStatsTest, CountsByCodeAndBuckets) {
  CallStats stats;
  stats.CountCall(Rpc::kQuery, absl::StatusCode::kOk);
  stats.CountCall(Rpc::kQuery, absl::StatusCode::kNotFound);
  stats.CountCall(Rpc::kQuery, static_cast<absl::StatusCode>(99));
  EXPECT_EQ(stats.Calls(Rpc::kQuery), 3u);
  EXPECT_EQ(stats.Calls(Rpc::kQuery, absl::StatusCode::kUnknown), 1u);
  EXPECT_EQ(stats.Calls(Rpc::kAttend), 0u);
  stats.RecordLatency(Rpc::kQuery, 50);  // On an edge: belongs to it.
  stats.RecordLatency(Rpc::kQuery, 50.1);
  stats.RecordLatency(Rpc::kQuery, 1e9);
  const LatencyHistogram::Snapshot snapshot = stats.latency(Rpc::kQuery).Read();
  EXPECT_EQ(snapshot.counts.front(), 1u);
  EXPECT_EQ(snapshot.counts[1], 1u);
  EXPECT_EQ(snapshot.counts.back(), 1u);
  EXPECT_EQ(snapshot.count, 3u);
  EXPECT_NEAR(snapshot.sum_us, 1e9 + 100.1, 1);
}

}  // namespace
}  // namespace wavekv
