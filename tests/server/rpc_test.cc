// proto/rpc: what both sides of the wire check and convert.

#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "grpc/grpc.h"
#include "grpc/support/log.h"
#include "gtest/gtest.h"
#include "proto/rpc/address.h"
#include "proto/rpc/grpc_log.h"
#include "proto/rpc/protocol_version.h"
#include "proto/rpc/status_conversion.h"
#include "proto/rpc/tensor_wire.h"
#include "storage/base/log.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();

TEST(StatusConversionTest, EveryCodeSurvivesTheRoundTrip) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), code == 0 ? "" : "why");
    const grpc::Status wire = ToGrpcStatus(status);
    EXPECT_EQ(static_cast<int>(wire.error_code()), code);
    EXPECT_EQ(FromGrpcStatus(wire), status);
  }
}

TEST(StatusConversionTest, CutsATextThatNoHeaderHolds) {
  const grpc::Status wire = ToGrpcStatus(absl::InternalError(std::string(100000, 'x')));
  EXPECT_EQ(wire.error_message().size(), kStatusMessageBytesMax);
  EXPECT_THAT(wire.error_message(), HasSubstr("(cut)"));
}

TEST(StatusConversionTest, CodeOfANewerProtocolIsUnknown) {
  const absl::Status status = FromGrpcStatus(grpc::Status(static_cast<grpc::StatusCode>(30), "x"));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnknown);
}

struct AddressRow {
  std::string text;
  std::string expected;  // ToString(), or a piece of the error after "!".
};

TEST(AddressTest, Parses) {
  const std::vector<AddressRow> rows = {
      {"unix:/run/w.sock", "unix:/run/w.sock"},
      {"unix:///run/w.sock", "unix:/run/w.sock"},  // The URI form of gRPC.
      {"unix:w.sock", "!not absolute"},
      {"unix:", "!not absolute"},
      {"unix:/" + std::string(107, 'p'), "!107"},
      {"unix:/" + std::string(106, 'p'), "unix:/" + std::string(106, 'p')},
      {"127.0.0.1:7070", "127.0.0.1:7070"},
      {"localhost:0", "localhost:0"},
      {"[::1]:7070", "[::1]:7070"},
      {"::1:7070", "!brackets"},
      {"localhost", "!no port"},
      {"localhost:", "!port"},
      {"localhost:70000", "!port"},
      {"localhost:-1", "!port"},
      {":7070", "!host"},
      {"a/b:7070", "!odd character"},
      {"", "!no port"},
  };
  for (const AddressRow& row : rows) {
    const absl::StatusOr<Address> address = ParseAddress(row.text);
    if (row.expected.starts_with("!")) {
      ASSERT_FALSE(address.ok()) << row.text;
      EXPECT_EQ(address.status().code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(address.status().message()), HasSubstr(row.expected.substr(1)));
    } else {
      ASSERT_TRUE(address.ok()) << row.text << ": " << address.status();
      EXPECT_EQ(address->ToString(), row.expected);
    }
  }
}

TEST(AddressTest, KnowsLoopback) {
  EXPECT_TRUE(ParseAddress("127.3.2.1:1")->IsLoopback());
  EXPECT_TRUE(ParseAddress("localhost:1")->IsLoopback());
  EXPECT_TRUE(ParseAddress("[::1]:1")->IsLoopback());
  EXPECT_FALSE(ParseAddress("0.0.0.0:1")->IsLoopback());
  EXPECT_FALSE(ParseAddress("10.0.0.1:1")->IsLoopback());
  EXPECT_FALSE(ParseAddress("unix:/x")->IsLoopback());
}

TEST(ProtocolVersionTest, TakesTheHighestCommonOneOrNamesBothRanges) {
  EXPECT_EQ(*NegotiateProtocolVersion(1, 1), 1u);
  EXPECT_EQ(*NegotiateProtocolVersion(1, 9), kProtocolVersionMax);
  const absl::Status newer = NegotiateProtocolVersion(8, 9).status();
  EXPECT_EQ(newer.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(newer.message()), HasSubstr("8 to 9"));
  EXPECT_THAT(std::string(newer.message()), HasSubstr("speaks 1 to 1"));
  EXPECT_EQ(NegotiateProtocolVersion(0, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(NegotiateProtocolVersion(2, 1).status().code(), absl::StatusCode::kInvalidArgument);
}

struct TensorRow {
  std::string why;
  int dtype;
  std::vector<int64_t> shape;
  int layout;
  size_t data_bytes;
  std::string error;  // Empty: fine.
};

TEST(TensorWireTest, BytesMustMatchShapeAndDtype) {
  const std::vector<TensorRow> rows = {
      {"exact", v1::DTYPE_F32, {2, 3}, 0, 24, ""},
      {"scalar", v1::DTYPE_BF16, {}, 1, 2, ""},
      {"no rows", v1::DTYPE_F16, {0, 64}, 2, 0, ""},
      {"short by one", v1::DTYPE_F32, {2, 3}, 0, 23, "23 bytes, expected 24"},
      {"long by one", v1::DTYPE_F16, {2, 3}, 0, 13, "13 bytes, expected 12"},
      {"no dtype", v1::DTYPE_UNSPECIFIED, {1}, 0, 4, "dtype is 0"},
      {"dtype of a newer protocol", 44, {1}, 0, 4, "dtype is 44"},
      {"layout of a newer protocol", v1::DTYPE_F32, {1}, 9, 4, "layout is 9"},
      {"negative", v1::DTYPE_F32, {-1, 4}, 0, 16, "negative dimension"},
      {"two negatives make no right", v1::DTYPE_F32, {-2, -2}, 0, 16, "negative dimension"},
      {"2^31 tokens", v1::DTYPE_F32, {int64_t{1} << 31, 64}, 0, 64, "expected 549755813888"},
      {"wraps to 0", v1::DTYPE_F32, {int64_t{1} << 32, int64_t{1} << 30}, 0, 0, "2^63"},
      {"beyond 64 bits", v1::DTYPE_F16, {kHuge, kHuge}, 0, 4, "2^63"},
      {"empty but beyond 64 bits", v1::DTYPE_F16, {0, kHuge, kHuge}, 0, 0, "2^63"},
      {"rank", v1::DTYPE_F32, {1, 1, 1, 1, 1, 1, 1, 1, 1}, 0, 4, "9 dimensions"},
  };
  for (const TensorRow& row : rows) {
    v1::Tensor tensor;
    tensor.set_dtype(static_cast<v1::DType>(row.dtype));
    tensor.mutable_shape()->Assign(row.shape.begin(), row.shape.end());
    tensor.set_layout(static_cast<v1::Layout>(row.layout));
    tensor.set_data(std::string(row.data_bytes, '\0'));
    const absl::Status status = CheckWireTensor(tensor, "keys");
    if (row.error.empty()) {
      EXPECT_TRUE(status.ok()) << row.why << ": " << status;
      continue;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << row.why;
    EXPECT_THAT(std::string(status.message()), HasSubstr(row.error)) << row.why;
    EXPECT_THAT(std::string(status.message()), HasSubstr("keys")) << row.why;
  }
}

TEST(TensorWireTest, FilledTensorPassesItsOwnCheck) {
  const float data[6] = {1, 2, 3, 4, 5, 6};
  v1::Tensor tensor;
  FillWireTensor(DType::kF32, std::vector<int64_t>{2, 3}, data, &tensor);
  EXPECT_TRUE(CheckWireTensor(tensor, "out").ok());
  EXPECT_EQ(tensor.data(), std::string(reinterpret_cast<const char*>(data), sizeof data));
  FillWireTensor(DType::kF32, std::vector<int64_t>{0, 3}, nullptr, &tensor);
  EXPECT_TRUE(CheckWireTensor(tensor, "out").ok());
}

// Row 32 of the list of faults: whatever parses must be judged without a crash.
TEST(TensorWireTest, RandomBytesAreJudgedNotTrusted) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  int parsed = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes(random() % 40, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    v1::Tensor tensor;
    if (!tensor.ParseFromString(bytes)) continue;
    ++parsed;
    const absl::Status status = CheckWireTensor(tensor, "fuzz");
    EXPECT_TRUE(status.ok() || status.code() == absl::StatusCode::kInvalidArgument);
  }
  EXPECT_GT(parsed, 0);
}

TEST(AddressTest, DefaultLiesInTheRuntimeDirectory) {
  const char* before = std::getenv("XDG_RUNTIME_DIR");
  const std::string saved = before == nullptr ? "" : before;
  setenv("XDG_RUNTIME_DIR", "/run/user/1000", 1);
  EXPECT_EQ(DefaultAddressOf("wavekvd"), "unix:/run/user/1000/wavekv/wavekvd.sock");
  setenv("XDG_RUNTIME_DIR", "not absolute", 1);
  EXPECT_EQ(DefaultAddressOf("wavekvd"), "unix:/run/wavekv/wavekvd.sock");
  unsetenv("XDG_RUNTIME_DIR");
  EXPECT_EQ(DefaultAddressOf("wavebufferd"), "unix:/run/wavekv/wavebufferd.sock");
  if (before != nullptr) setenv("XDG_RUNTIME_DIR", saved.c_str(), 1);
}

TEST(GrpcLogTest, WhatGrpcSaysIsALineLikeOthers) {
  std::string lines;
  SetLogSink([&lines](absl::string_view line) { lines.append(line.data(), line.size()); });
  grpc_init();  // Before, nothing is worth saying.
  TakeGrpcLog();
  gpr_log(GPR_ERROR, "cannot do %d things", 3);
  grpc_shutdown();
  SetLogSink(nullptr);
  EXPECT_THAT(lines, HasSubstr("level=error event=grpc place="));
  EXPECT_THAT(lines, HasSubstr("rpc_test.cc:"));
  EXPECT_THAT(lines, HasSubstr("message=\"cannot do 3 things\"\n"));
}

}  // namespace
}  // namespace wavekv
