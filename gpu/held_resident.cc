#include "gpu/held_resident.h"

#include <utility>

#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

class HeldResident : public ResidentSequence {
 public:
  HeldResident(std::unique_ptr<ResidentSequence> region, std::shared_ptr<const void> buffer,
               std::function<absl::Status()> check_buffer)
      : buffer_(std::move(buffer)),
        check_buffer_(std::move(check_buffer)),
        region_(std::move(region)) {}

  ResidentPlace place() const override { return region_->place(); }
  absl::Status Load(uint32_t layer, const ResidentLayer& view) override {
    WAVEKV_RETURN_IF_ERROR(check_buffer_());
    return region_->Load(layer, view);
  }
  absl::StatusOr<bool> Publish(uint32_t layer, const ResidentLayer& view) override {
    WAVEKV_RETURN_IF_ERROR(check_buffer_());
    return region_->Publish(layer, view);
  }
  absl::StatusOr<std::vector<uint64_t>> Poll() override {
    WAVEKV_RETURN_IF_ERROR(check_buffer_());
    return region_->Poll();
  }
  absl::Status ReadRows(uint32_t layer, uint64_t first, uint32_t count, std::byte* keys,
                        std::byte* values) override {
    return region_->ReadRows(layer, first, count, keys, values);
  }
  absl::StatusOr<bool> Drained() override {
    WAVEKV_RETURN_IF_ERROR(check_buffer_());
    return region_->Drained();
  }
  void Close(std::function<bool()> engine_is_gone) override {
    region_->Close(std::move(engine_is_gone));
  }
  ResidentCounters counters() const override { return region_->counters(); }

 private:
  const std::shared_ptr<const void> buffer_;
  const std::function<absl::Status()> check_buffer_;
  const std::unique_ptr<ResidentSequence> region_;  // Last: it goes before its buffer.
};

}  // namespace

std::unique_ptr<ResidentSequence> HoldResident(std::unique_ptr<ResidentSequence> region,
                                               std::shared_ptr<const void> buffer,
                                               std::function<absl::Status()> check_buffer) {
  return std::make_unique<HeldResident>(std::move(region), std::move(buffer),
                                        std::move(check_buffer));
}

}  // namespace wavekv
