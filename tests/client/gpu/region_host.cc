#include "tests/client/gpu/region_host.h"

#include <cstring>
#include <utility>

#include "storage/base/check.h"
#include "storage/base/shared_memory.h"

namespace wavekv::client {
namespace {

constexpr uint64_t kMaxTokens = 1 << 20;  // Beyond every test's ring.

uint64_t RoundUp(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

// Counts a peer for as long as it holds its connection.
class RegionHost::Holder : public KeptPeer {
 public:
  explicit Holder(std::shared_ptr<std::atomic<int>> count) : count_(std::move(count)) {}
  bool OnKept(int /*socket_fd*/) override {
    ++*count_;
    return true;
  }
  void OnGone() override { --*count_; }

 private:
  const std::shared_ptr<std::atomic<int>> count_;
};

RegionHost::RegionHost(std::shared_ptr<const CudaDevice> device, uint64_t buffer_bytes)
    : device_(device),
      allocation_(
          SharedAllocation::Create(device, RoundUp(buffer_bytes, device->allocation_unit_bytes()))
              .value()),
      mapping_(DeviceMapping::Map(allocation_, DeviceMapping::kReadWrite).value()),
      stream_(DeviceStream::Create(std::move(device)).value()) {
  const std::string path = directory_.path() + "/tickets";
  server_ =
      DescriptorServer::Start(FdListener::Listen(path).value(), {},
                              [this](absl::string_view ticket, const PeerCredentials& /*peer*/,
                                     UniqueFd process) -> absl::StatusOr<Redeemed> {
                                if (ticket != ticket_) return absl::NotFoundError("unknown ticket");
                                absl::StatusOr<UniqueFd> fd = allocation_->Export();
                                if (!fd.ok()) return fd.status();
                                ++*redeemed_;
                                return Redeemed(*std::move(fd), std::make_shared<Holder>(held_),
                                                std::move(process));
                              })
          .value();
}

void RegionHost::Copy(uint64_t offset, std::byte* data, uint64_t bytes, bool in) const {
  const cuda::DevicePointer at = mapping_->address() + offset;
  absl::Status status = in ? stream_->CopyIn(at, data, bytes) : stream_->CopyOut(data, at, bytes);
  status.Update(stream_->Synchronise());
  WAVEKV_CHECK(status.ok(), std::string(status.message()).c_str());
}

ResidentAttachment RegionHost::Attach(gpu::RegionImage& image, const ModelShape& shape) {
  ResidentAttachment attachment;
  attachment.sequence = SequenceId(image.header().sequence_id);
  attachment.shape = shape;
  attachment.device_uuid = device_->identity().uuid;
  attachment.socket = directory_.path() + "/tickets";
  attachment.ticket = ticket_;
  attachment.buffer_bytes = allocation_->bytes();
  attachment.region_offset = used_;
  attachment.region_bytes = image.bytes().size();
  attachment.max_tokens = kMaxTokens;
  attachment.token_count = image.state(0).appended;
  attachment.ring_rows = image.header().unit.ring_rows;
  Copy(used_, reinterpret_cast<std::byte*>(image.bytes().data()), image.bytes().size(), true);
  used_ += RoundUp(image.bytes().size(), resident::kAlignBytes);
  for (const std::vector<uint16_t>& rows : image.windows()) {
    PoolWindow& window = attachment.windows.emplace_back();
    window.bytes = RoundUp(rows.size() * sizeof(uint16_t) + 1, 4096);
    window.fd = CreateMemfd("region_host", window.bytes).value();
    Mapping& written = windows_.emplace_back(
        Mapping::Map(window.fd.get(), window.bytes, Mapping::kReadWrite).value());
    std::memcpy(written.data(), rows.data(), rows.size() * sizeof(uint16_t));
    WAVEKV_CHECK(SealForReaders(window.fd.get()).ok(), "a fresh memfd can be sealed");
  }
  return attachment;
}

ModelShape ShapeOf(gpu::RegionImage& image, uint32_t group, float scale) {
  const resident::ResidentHeader& header = image.header();
  return {.layer_count = header.layer_count,
          .query_head_count = header.kv_head_count * group,
          .kv_head_count = header.kv_head_count,
          .key_dim = header.head_dim,
          .value_dim = header.head_dim,
          .dtype = header.element == static_cast<uint32_t>(gpu::Element::kBF16) ? DType::kBF16
                                                                                : DType::kF16,
          .softmax_scale = scale};
}

}  // namespace wavekv::client
