// The table of levels, and which of them runs.
#include "index/simd/kernels.h"

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "index/simd/kernel_parts.h"
#include "index/simd/targets.h"
#include "storage/base/check.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "index/simd/kernels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace wavekv::simd::HWY_NAMESPACE {

const char* IsaName() {
  switch (HWY_TARGET) {
    case HWY_SCALAR:
      return "scalar";
    case HWY_AVX2:
      return "avx2";
    case HWY_AVX3:
      return "avx512";
    case HWY_NEON:
      return "neon";
    default:
      return hwy::TargetName(HWY_TARGET);
  }
}

void FillLevel(Kernels* kernels) {
  kernels->isa = IsaName();
  kernels->float_lanes = HWY_LANES(float);
}

}  // namespace wavekv::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wavekv::simd {
namespace {

HWY_EXPORT(FillLevel);

// Best first: a lower bit is a better target.
std::vector<Kernels> MakeLevels() {
  std::vector<Kernels> levels;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    Kernels level{};
    HWY_DYNAMIC_DISPATCH(FillLevel)(&level);
    SetDotKernels(&level);
    SetAccumulateKernels(&level);
    SetElementwiseKernels(&level);
    SetSketchKernels(&level);
    SetPanelKernels(&level);
    SetAssignKernels(&level);
    if (level.isa == std::string_view("avx512")) {
      Kernels extended = level;
      if (SetVnniKernels(&extended)) {
        levels.push_back(extended);
        if (SetBf16Kernels(&extended)) levels.insert(levels.end() - 1, extended);
      }
    }
    levels.push_back(level);
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  return levels;
}

}  // namespace

std::span<const Kernels* const> AvailableKernels() {
  static const std::vector<Kernels> levels = MakeLevels();
  static const std::vector<const Kernels*> list = [] {
    std::vector<const Kernels*> pointers;
    for (const Kernels& level : levels) pointers.push_back(&level);
    return pointers;
  }();
  return list;
}

absl::StatusOr<const Kernels*> FindKernels(std::string_view isa) {
  std::string available;
  for (const Kernels* kernels : AvailableKernels()) {
    if (isa.empty() || isa == kernels->isa) return kernels;
    absl::StrAppend(&available, available.empty() ? "" : ", ", kernels->isa);
  }
  return absl::InvalidArgumentError(absl::StrCat("WAVEKV_ISA is '",
                                                 absl::string_view(isa.data(), isa.size()),
                                                 "', expected one of: ", available));
}

absl::StatusOr<const Kernels*> ChooseKernels() {
  const char* isa = std::getenv("WAVEKV_ISA");
  return FindKernels(isa == nullptr ? "" : isa);
}

const Kernels& ActiveKernels() {
  static const Kernels* const active = [] {
    const absl::StatusOr<const Kernels*> found = ChooseKernels();
    WAVEKV_CHECK(found.ok(), std::string(found.status().message()).c_str());
    return *found;
  }();
  return *active;
}

}  // namespace wavekv::simd
#endif  // HWY_ONCE
