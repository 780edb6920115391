// Bytes from outside are hostile: whatever a client sends, the daemon answers with a status, lives,
// and other sequences keep their answers. Seeds are printed, so that a failure can be run again.

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <random>

#include "google/protobuf/descriptor.h"
#include "tests/integration/raw_client.h"
#include "tests/integration/sdk_test.h"

namespace wavekv::integration {
namespace {

class FuzzTest : public SdkTest {
 protected:
  void SetUp() override {
    Start({.wave_buffer = false});
    const uint64_t seed = std::random_device()();
    RecordProperty("seed", std::to_string(seed));
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    random_.seed(seed);
    sequence_ = CreateFilled(&cache_);
    ASSERT_NE(sequence_, nullptr);
    queries_ = RandomQueries(Shape(), 1);
    const auto attention = sequence_->Attend(1, QueryTensor(Shape(), queries_));
    ASSERT_OK(attention.status());
    answer_ = attention->out;
    auto raw = RawClient::Attach(daemons().address());
    ASSERT_OK(raw.status());
    raw_ = std::move(raw).value();
  }

  // It ends in order, too: a sanitizer says by the exit code what it has found.
  void TearDown() override {
    sequence_.reset();
    session_.reset();
    raw_.reset();
    EXPECT_EQ(daemons().wavekvd().Stop(std::chrono::seconds(60)), 0)
        << daemons().wavekvd().Output();
  }

  // The daemon is the same process, serves, and the sequence's answer has the same bits.
  void ExpectUnharmed() {
    EXPECT_EQ(daemons().wavekvd().WaitForExit(std::chrono::milliseconds(0)), std::nullopt)
        << daemons().wavekvd().Output();
    EXPECT_TRUE(raw_->CheckHealth().ok());
    const auto attention = sequence_->Attend(1, QueryTensor(Shape(), queries_));
    ASSERT_OK(attention.status());
    EXPECT_EQ(attention->out, answer_);
  }

  static std::vector<std::string> Methods() {
    std::vector<std::string> methods;
    const auto* service =
        google::protobuf::DescriptorPool::generated_pool()->FindServiceByName("wavekv.v1.WaveKV");
    for (int i = 0; i < service->method_count(); ++i) {
      methods.push_back("/wavekv.v1.WaveKV/" + service->method(i)->name());
    }
    return methods;
  }

  std::string RandomBytes(size_t bytes_max) {
    std::string bytes(random_() % (bytes_max + 1), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random_());
    return bytes;
  }

  // Random requests of the right type: every field set to something, often to an edge.
  void FillRandomly(google::protobuf::Message* message, int depth);
  uint64_t EdgeNumber();

  HostCache cache_ = HostCache::Random(Shape(), 1500, 5);
  std::unique_ptr<client::Sequence> sequence_;
  std::vector<float> queries_;
  std::vector<float> answer_;
  std::unique_ptr<RawClient> raw_;
  std::mt19937_64 random_;
};

// Bytes that are no message of any type, to every method.
TEST_F(FuzzTest, RandomBytesAsMessages) {
  const std::vector<std::string> methods = Methods();
  ASSERT_GE(methods.size(), 20u);
  for (int round = 0; round < 20; ++round) {
    for (const std::string& method : methods) {
      // Its success would end this client's life, and nothing else.
      if (method.ends_with("/Detach")) continue;
      std::vector<std::string> messages;
      for (uint64_t i = 0; i <= random_() % 3; ++i) messages.push_back(RandomBytes(300));
      (void)raw_->CallBytes(method, messages);
    }
  }
  ExpectUnharmed();
}

uint64_t FuzzTest::EdgeNumber() {
  constexpr uint64_t kEdges[] = {0,          1,          2,          63,         64,
                                 65,         1500,       8192,       1ull << 16, 1ull << 31,
                                 1ull << 32, 1ull << 62, 1ull << 63, ~0ull,      ~0ull >> 1};
  return random_() % 4 == 0 ? random_() : kEdges[random_() % std::size(kEdges)];
}

void FuzzTest::FillRandomly(google::protobuf::Message* message, int depth) {
  using google::protobuf::FieldDescriptor;
  if (auto* ref = dynamic_cast<v1::SequenceRef*>(message); ref != nullptr && random_() % 4 != 0) {
    // A real sequence, but a generation of the future: nothing may be written to it.
    ref->set_sequence_id(sequence_->id());
    ref->set_generation(sequence_->generation() + 1 + random_() % 3);
    return;
  }
  const auto* reflection = message->GetReflection();
  for (int i = 0; i < message->GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message->GetDescriptor()->field(i);
    if (random_() % 8 == 0) continue;
    const uint64_t number = EdgeNumber();
    const int copies = field->is_repeated() ? static_cast<int>(random_() % 4) : 1;
    for (int copy = 0; copy < copies; ++copy) {
      const bool add = field->is_repeated();
      switch (field->cpp_type()) {
        case FieldDescriptor::CPPTYPE_INT64: {
          const auto value = static_cast<int64_t>(number);
          add ? reflection->AddInt64(message, field, value)
              : reflection->SetInt64(message, field, value);
          break;
        }
        case FieldDescriptor::CPPTYPE_UINT64:
          add ? reflection->AddUInt64(message, field, number)
              : reflection->SetUInt64(message, field, number);
          break;
        case FieldDescriptor::CPPTYPE_UINT32: {
          const auto value = static_cast<uint32_t>(number);
          add ? reflection->AddUInt32(message, field, value)
              : reflection->SetUInt32(message, field, value);
          break;
        }
        case FieldDescriptor::CPPTYPE_DOUBLE:
          if (!add) reflection->SetDouble(message, field, std::bit_cast<double>(random_()));
          break;
        case FieldDescriptor::CPPTYPE_FLOAT:
          if (!add) {
            reflection->SetFloat(message, field,
                                 std::bit_cast<float>(static_cast<uint32_t>(random_())));
          }
          break;
        case FieldDescriptor::CPPTYPE_BOOL:
          if (!add) reflection->SetBool(message, field, number % 2 == 1);
          break;
        case FieldDescriptor::CPPTYPE_ENUM:
          if (!add) reflection->SetEnumValue(message, field, static_cast<int>(number % 7));
          break;
        case FieldDescriptor::CPPTYPE_STRING:
          if (!add) {
            reflection->SetString(message, field,
                                  field->type() == FieldDescriptor::TYPE_BYTES
                                      ? RandomBytes(70'000)
                                      : std::string(number % 300, 'a'));
          }
          break;
        case FieldDescriptor::CPPTYPE_MESSAGE:
          if (field->is_map() || depth == 0) break;
          FillRandomly(add ? reflection->AddMessage(message, field)
                           : reflection->MutableMessage(message, field),
                       depth - 1);
          break;
        default:
          break;
      }
    }
  }
}

// Well-formed messages with senseless contents, which get past the parser: 2^31 tokens, negative
// shapes, NaN budgets, layers that are not there.
TEST_F(FuzzTest, SenselessRequests) {
  const auto* pool = google::protobuf::DescriptorPool::generated_pool();
  const auto* service = pool->FindServiceByName("wavekv.v1.WaveKV");
  auto* factory = google::protobuf::MessageFactory::generated_factory();
  for (int round = 0; round < 60; ++round) {
    for (int i = 0; i < service->method_count(); ++i) {
      const auto* method = service->method(i);
      if (method->name() == "Detach") continue;
      std::vector<std::string> messages;
      for (uint64_t copy = 0; copy <= random_() % 2; ++copy) {
        const std::unique_ptr<google::protobuf::Message> request(
            factory->GetPrototype(method->input_type())->New());
        FillRandomly(request.get(), 3);
        messages.push_back(request->SerializeAsString());
      }
      (void)raw_->CallBytes("/wavekv.v1.WaveKV/" + method->name(), messages);
    }
  }
  ExpectUnharmed();
}

// A valid request with a few bytes changed is the likeliest of all to get far.
TEST_F(FuzzTest, SpoiledRequests) {
  v1::AttendRequest request;
  v1::AttendItem* item = request.add_items();
  item->mutable_sequence()->set_sequence_id(sequence_->id());
  item->mutable_sequence()->set_generation(sequence_->generation());
  item->set_layer(1);
  item->mutable_queries()->set_dtype(v1::DTYPE_F32);
  item->mutable_queries()->add_shape(4);
  item->mutable_queries()->add_shape(64);
  item->mutable_queries()->set_data(queries_.data(), queries_.size() * sizeof(float));
  const std::string valid = request.SerializeAsString();
  ASSERT_TRUE(raw_->CallBytes("/wavekv.v1.WaveKV/Attend", {valid}).ok());
  for (int round = 0; round < 500; ++round) {
    std::string spoiled = valid;
    for (uint64_t i = 0; i <= random_() % 4; ++i) {
      // The head of the message holds its structure; the tail is floats.
      spoiled[random_() % 40] = static_cast<char>(random_());
    }
    if (random_() % 4 == 0) spoiled.resize(random_() % spoiled.size());
    (void)raw_->CallBytes("/wavekv.v1.WaveKV/Attend", {spoiled});
    (void)raw_->CallBytes("/wavekv.v1.WaveKV/Decode", {valid, spoiled});
  }
  ExpectUnharmed();
}

// No HTTP/2 at all.
TEST_F(FuzzTest, RandomBytesOnTheSocket) {
  const std::string path = daemons().address().substr(std::string("unix:").size());
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  ASSERT_LT(path.size(), sizeof(address.sun_path));
  path.copy(address.sun_path, path.size());
  for (int round = 0; round < 200; ++round) {
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ASSERT_GE(fd, 0);
    ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    std::string bytes = RandomBytes(2000);
    // Every second one begins as a gRPC client does.
    if (round % 2 == 0) bytes.insert(0, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    (void)send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    close(fd);
  }
  ExpectUnharmed();
}

}  // namespace
}  // namespace wavekv::integration
