#include "tests/gpu/test_backend.h"

#include <string_view>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/descriptor_protocol.h"
#include "storage/base/status_macros.h"
#include "tests/gpu/child_process.h"
#include "tests/gpu/driver/use_fake_cuda.h"

namespace wavekv {
namespace {

// What a wavebufferd says that its context takes.
uint64_t MeasureContext() {
  const TempDir directory;
  WavebufferdProcess wavebufferd(directory.path(), {"--backend=cuda", "--bytes_max=4GiB"});
  WAVEKV_CHECK(wavebufferd.ready(), wavebufferd.process().output().c_str());
  constexpr std::string_view kKey = "context_bytes=";
  const std::string& output = wavebufferd.process().output();
  const size_t at = output.find(kKey) + kKey.size();
  uint64_t bytes = 0;
  WAVEKV_CHECK(absl::SimpleAtoi(output.substr(at, output.find_first_of(" \n", at) - at), &bytes),
               output.c_str());
  return bytes;
}

}  // namespace

TestBackend::TestBackend(const std::string& name)
    : name_(name), fake_(name == "cuda" && UseFakeCuda()) {
  if (!cuda()) return;
  static const uint64_t context_bytes = MeasureContext();
  context_bytes_ = context_bytes;
}

std::vector<std::string> TestBackend::Flags(uint64_t bytes) const {
  return {absl::StrCat("--backend=", name_), absl::StrCat("--bytes_max=", LimitFor(bytes))};
}

absl::StatusOr<ClientView> ClientView::Open(const WaveBufferAccess& access) {
  ClientView view;
  WAVEKV_ASSIGN_OR_RETURN(HeldDescriptor held,
                          FetchHeldDescriptor(access.socket, access.ticket, kWait));
  if (access.backend == "host") {
    WAVEKV_ASSIGN_OR_RETURN(view.mapping_,
                            Mapping::Map(held.fd.get(), access.buffer_bytes, Mapping::kReadOnly));
    return view;
  }
  WAVEKV_ASSIGN_OR_RETURN(
      view.device_,
      client::DeviceReader::Open(access.device_uuid, std::move(held), access.buffer_bytes));
  WAVEKV_RETURN_IF_ERROR(view.Refresh());
  return view;
}

absl::Status ClientView::Refresh() {
  if (device_ == nullptr) return absl::OkStatus();
  copy_.resize(device_->bytes());
  const client::DeviceReader::Piece all{0, copy_.data(), copy_.size()};
  return device_->Read({&all, 1});
}

}  // namespace wavekv
