// wavebufferd as a process among processes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gpu/buffer_client.h"
#include "gpu/buffer_layout.h"
#include "gpu/buffer_stager.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "proto/rpc/status_conversion.h"
#include "storage/base/descriptor_protocol.h"
#include "storage/base/fd_socket.h"
#include "storage/base/shared_memory.h"
#include "tests/gpu/child_process.h"
#include "tests/gpu/stage_rows.h"
#include "tests/program_path.h"
#include "tests/unread_pipe.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kBufferBytes = uint64_t{4} << 20;

std::vector<std::string> Wavebufferd(const std::vector<std::string>& flags) {
  std::vector<std::string> arguments = {ProgramPath("wavebufferd")};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  return arguments;
}

BufferStagerOptions StagerOptions() {
  BufferStagerOptions options;
  options.tenant_buffer_bytes = kBufferBytes;
  options.heartbeat_ms = 50;
  return options;
}

// Descriptors of wave buffers that a process has open.
size_t OpenBuffers(pid_t pid) {
  size_t count = 0;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", pid, "/fd"), error)) {
    const std::string target = std::filesystem::read_symlink(entry.path(), error).string();
    count += target.find("memfd:wavekv_wave_buffer") != std::string::npos;
  }
  return count;
}

class WavebufferdTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(wavebufferd_.ready()) << wavebufferd_.process().output();
    client_ = CreateBufferClient(wavebufferd_.address()).value();
  }
  uint64_t BytesUsed() { return client_->Stats().value().bytes_used; }

  TempDir directory_;
  WavebufferdProcess wavebufferd_{directory_.path(), {"--bytes_max=64MiB"}};
  std::unique_ptr<BufferClient> client_;
};

TEST_F(WavebufferdTest, SocketsHaveTheModesTheyShould) {
  struct stat info;
  ASSERT_EQ(::stat((directory_.path() + "/wavebufferd.sock").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  ASSERT_EQ(::stat(wavebufferd_.descriptor_socket().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0666u);  // Tickets decide there.
}

// The answer of a unary call, as bytes.
absl::StatusOr<std::string> CallRaw(const std::string& address, const std::string& method) {
  grpc::GenericStub stub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kWait);
  context.set_wait_for_ready(true);
  grpc::CompletionQueue queue;
  const grpc::Slice nothing("");
  const auto call = stub.PrepareUnaryCall(&context, method, grpc::ByteBuffer(&nothing, 1), &queue);
  call->StartCall();
  grpc::ByteBuffer reply;
  grpc::Status status;
  call->Finish(&reply, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  if (!status.ok()) return FromGrpcStatus(status);
  grpc::Slice slice;
  if (!reply.DumpToSingleSlice(&slice).ok()) return absl::InternalError("no reply");
  return std::string(reinterpret_cast<const char*>(slice.begin()), slice.size());
}

TEST_F(WavebufferdTest, SaysThatItIsHealthy) {
  const auto reply = CallRaw(wavebufferd_.address(), "/grpc.health.v1.Health/Check");
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(*reply, "\x08\x01");  // Field 1, `status`: SERVING.
}

TEST_F(WavebufferdTest, SecondOnTheSameAddressFailsAndTheFirstGoesOn) {
  ChildProcess second(Wavebufferd({"--listen=" + wavebufferd_.address()}));
  EXPECT_EQ(second.WaitForExit(), 1);
  EXPECT_THAT(second.output(),
              testing::AllOf(HasSubstr(wavebufferd_.address()), HasSubstr("event=failed")));
  EXPECT_TRUE(client_->Stats().ok());
  EXPECT_TRUE(FdSocket::Connect(wavebufferd_.descriptor_socket(), kWait).ok());
}

TEST_F(WavebufferdTest, StopsOnSigtermAndStartsAgain) {
  wavebufferd_.process().Signal(SIGTERM);
  EXPECT_EQ(wavebufferd_.process().WaitForExit(), 0);
  EXPECT_THAT(wavebufferd_.process().output(), HasSubstr("event=stopped"));
  EXPECT_FALSE(std::filesystem::exists(wavebufferd_.descriptor_socket()));
  EXPECT_TRUE(absl::IsUnavailable(client_->Stats().status()));
  WavebufferdProcess again(directory_.path());
  ASSERT_TRUE(again.ready()) << again.process().output();
  EXPECT_TRUE(WaitUntil([this] { return client_->Stats().ok(); }));
}

TEST_F(WavebufferdTest, ServesAndStopsWhenNobodyReadsItsLog) {
  const TempDir directory;
  UnreadPipe pipe;
  pipe.Fill();
  const std::string address = absl::StrCat("unix:", directory.path(), "/s");
  // By its path: a shell need not know descriptors of two digits.
  const std::string to_pipe = absl::StrCat("2>/proc/", ::getpid(), "/fd/", pipe.write_end());
  ChildProcess unread({"/bin/sh", "-c", absl::StrCat("exec \"$0\" \"$1\" ", to_pipe),
                       ProgramPath("wavebufferd"), "--listen=" + address});
  const auto reply = CallRaw(address, "/grpc.health.v1.Health/Check");
  EXPECT_TRUE(reply.ok()) << reply.status();
  unread.Signal(SIGTERM);
  EXPECT_EQ(unread.WaitForExit(), 0);
  EXPECT_EQ(pipe.Drain(), UnreadPipe::Filling());
}

TEST_F(WavebufferdTest, KilledManagersCostNothing) {
  for (int round = 0; round < 20; ++round) {
    ChildProcess manager({ProgramPath("wave_buffer_peer"), "manage", wavebufferd_.address(),
                          absl::StrCat(uint64_t{48} << 20)});
    ASSERT_FALSE(manager.WaitForLine("holding").empty()) << manager.output();
    EXPECT_EQ(BytesUsed(), uint64_t{48} << 20);
    EXPECT_GT(OpenBuffers(wavebufferd_.process().pid()), 0u);
    manager.Kill();
    ASSERT_TRUE(WaitUntil([this] { return BytesUsed() == 0; })) << "round " << round;
    EXPECT_EQ(OpenBuffers(wavebufferd_.process().pid()), 0u);
  }
}

// Of a lease so short that a busy machine may break it: only this test wants one.
TEST(WavebufferdLeaseTest, StoppedManagerKeepsWhatItMaps) {
  const TempDir directory;
  WavebufferdProcess wavebufferd(directory.path(), {"--bytes_max=64MiB", "--lease_ms=300"});
  ASSERT_TRUE(wavebufferd.ready()) << wavebufferd.process().output();
  const auto client = CreateBufferClient(wavebufferd.address()).value();
  const auto bytes_used = [&] { return client->Stats().value().bytes_used; };
  ChildProcess manager({ProgramPath("wave_buffer_peer"), "manage", wavebufferd.address(),
                        absl::StrCat(kBufferBytes)});
  ASSERT_FALSE(manager.WaitForLine("holding").empty()) << manager.output();
  manager.Signal(SIGSTOP);
  ASSERT_FALSE(wavebufferd.process().WaitForLine("event=manager_stalled").empty());
  EXPECT_EQ(bytes_used(), kBufferBytes);
  manager.Kill();
  ASSERT_TRUE(WaitUntil([&] { return bytes_used() == 0; }));
}

TEST_F(WavebufferdTest, StagerGivesItsBuffersBack) {
  auto stager = ConnectWaveBuffer(wavebufferd_.address(), StagerOptions());
  ASSERT_TRUE(stager.ok()) << stager.status();
  ASSERT_TRUE((*stager)->Access("alice", 0).ok());
  ASSERT_TRUE((*stager)->Access("bob", 0).ok());
  EXPECT_EQ(BytesUsed(), 2 * kBufferBytes);
  stager->reset();
  EXPECT_EQ(BytesUsed(), 0u);
}

// A reader in a process of its own sees the very bytes, and cannot map them for writing.
TEST_F(WavebufferdTest, AnotherProcessReadsWhatWasStaged) {
  auto stager = ConnectWaveBuffer(wavebufferd_.address(), StagerOptions());
  ASSERT_TRUE(stager.ok()) << stager.status();
  ModelShape shape;
  shape.layer_count = 1;
  shape.query_head_count = 1;
  shape.kv_head_count = 1;
  shape.key_dim = 64;
  shape.value_dim = 64;
  shape.softmax_scale = 1;
  ASSERT_TRUE((*stager)->AttachSequence("me", SequenceId(1), shape, 1024).ok());
  std::vector<StageHead> heads(1);
  heads[0].steady = {RunOf(std::make_shared<CodedRows>(shape, 3, 0, 200), 0, 0)};
  const auto step = (*stager)->Stage(SequenceId(1), 0, 0, heads);
  ASSERT_TRUE(step.ok()) << step.status();
  const auto access = (*stager)->Access("me", ::getuid());
  ASSERT_TRUE(access.ok()) << access.status();
  const auto fd = FetchDescriptor(access->socket, access->ticket, kWait);
  ASSERT_TRUE(fd.ok()) << fd.status();
  const auto mapping = Mapping::Map(fd->get(), access->buffer_bytes, Mapping::kReadOnly);
  ASSERT_TRUE(mapping.ok()) << mapping.status();
  ChildProcess reader({ProgramPath("wave_buffer_peer"), "read", absl::StrCat(::getuid()),
                       access->socket, absl::BytesToHexString(access->ticket),
                       absl::StrCat(access->buffer_bytes)});
  EXPECT_EQ(reader.WaitForExit(), 0);
  EXPECT_THAT(reader.output(),
              testing::AllOf(HasSubstr("writable=PERMISSION_DENIED"),
                             HasSubstr(absl::StrCat("checksum=",
                                                    Checksum(mapping->data(), mapping->bytes())))));
}

TEST_F(WavebufferdTest, TicketOfAnotherUidIsUnknown) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become somebody else";
  ASSERT_EQ(::chmod(directory_.path().c_str(), 0755), 0);
  auto stager = ConnectWaveBuffer(wavebufferd_.address(), StagerOptions());
  ASSERT_TRUE(stager.ok()) << stager.status();
  const auto access = (*stager)->Access("them", 4001);
  ASSERT_TRUE(access.ok()) << access.status();
  const std::string ticket = absl::BytesToHexString(access->ticket);
  ChildProcess owner({ProgramPath("wave_buffer_peer"), "fetch", "4001", access->socket, ticket});
  EXPECT_EQ(owner.WaitForExit(), 0) << owner.output();
  EXPECT_THAT(owner.output(), HasSubstr("writable=PERMISSION_DENIED"));
  ChildProcess thief({ProgramPath("wave_buffer_peer"), "fetch", "4002", access->socket, ticket});
  EXPECT_EQ(thief.WaitForExit(), 1);
  EXPECT_THAT(thief.output(), HasSubstr("NOT_FOUND: unknown ticket"));
}

TEST_F(WavebufferdTest, GarbageOnEitherSocketDoesNotStopIt) {
  std::mt19937_64 random(std::random_device{}());
  for (int i = 0; i < 300; ++i) {
    std::string bytes(1 + random() % 200, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    FdSocket socket = FdSocket::Connect(wavebufferd_.descriptor_socket(), kWait).value();
    ASSERT_TRUE(socket.Send(bytes, -1, kWait).ok());
    const auto reply = socket.Receive(kDescriptorReplyBytesMax, kWait);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_FALSE(DecodeDescriptorReply(reply->bytes).ok());
    const std::string secret = bytes;
    EXPECT_TRUE(absl::IsNotFound(client_->Heartbeat(secret)));
    EXPECT_TRUE(absl::IsNotFound(client_->Release(secret, random())));
    EXPECT_FALSE(client_->Allocate(secret, "tenant", random()).ok());
  }
  EXPECT_EQ(BytesUsed(), 0u);
}

TEST(WavebufferdFlagsTest, BadOnesAreNamed) {
  const TempDir directory;
  const std::string listen = "--listen=unix:" + directory.path() + "/w.sock";
  struct Row {
    std::vector<std::string> flags;
    int exit;
    std::string names;
  };
  const Row rows[] = {
      {{listen, "--backend=vulkan"}, 2, "expected host or cuda"},
      {{"--listen=127.0.0.1:70"}, 2, "descriptors cannot be passed over a network"},
      {{"--listen=unix:relative"}, 2, "relative"},
      {{listen, "--bytes_max=0"}, 2, "--bytes_max is 0 bytes"},
      {{listen, "--bytes_max=8GB"}, 2, "8GB"},
      {{listen, "--no_such_flag"}, 2, "--no_such_flag"},
      {{listen, "--bytes_max=1000TiB"}, 1, "lower --bytes_max"},  // More than any machine has.
      {{listen, "--lease_ms=1"}, 2, "--lease_ms is 1"},
      {{listen, "--threads_max=1"}, 2, "--threads_max is 1"},
      {{listen, "--log_level=loud"}, 2, "loud"},
      {{listen, "start"}, 2, "unexpected argument"},
      {{"--listen=unix:/nonexistent/a/b.sock"}, 1, "/nonexistent/a"},
  };
  for (const Row& row : rows) {
    ChildProcess process(Wavebufferd(row.flags));
    EXPECT_EQ(process.WaitForExit(), row.exit) << row.names;
    EXPECT_THAT(process.output(), testing::AllOf(HasSubstr(row.names), HasSubstr("event=failed")));
  }
}

TEST(WavebufferdFlagsTest, VersionIsSaid) {
  ChildProcess process(Wavebufferd({"--version"}));
  EXPECT_EQ(process.WaitForExit(), 0);
  EXPECT_THAT(process.output(), HasSubstr(absl::StrCat("wavebufferd ", WAVEKV_VERSION)));
}

TEST(WavebufferdFlagsTest, FlagfileIsRead) {
  const TempDir directory;
  const std::string path = directory.path() + "/flags";
  FILE* file = std::fopen(path.c_str(), "w");
  ASSERT_NE(file, nullptr);
  std::fprintf(file, "--bytes_max=3MiB\n--listen=unix:%s/wavebufferd.sock\n",
               directory.path().c_str());
  std::fclose(file);
  ChildProcess process(Wavebufferd({"--flagfile=" + path}));
  EXPECT_THAT(process.WaitForLine("event=ready"), HasSubstr("bytes_max=3145728"));
}

}  // namespace
}  // namespace wavekv
