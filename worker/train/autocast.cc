#include "worker/train/autocast.h"

#include "ATen/autocast_mode.h"

namespace muster {
namespace {

at::ScalarType Dtype(MixedPrecision precision) {
  return precision == MixedPrecision::kFp16 ? at::kHalf : at::kBFloat16;
}

}  // namespace

MixedPrecision ParseMixedPrecision(absl::string_view text) {
  if (text == "no") return MixedPrecision::kNo;
  if (text == "fp16") return MixedPrecision::kFp16;
  if (text == "bf16") return MixedPrecision::kBf16;
  TORCH_CHECK(text != "fp8", "mixed_precision 'fp8' is not supported: choose no, fp16 or bf16");
  TORCH_CHECK(false, "unknown mixed_precision '", std::string(text), "': choose no, fp16 or bf16");
}

const char* MixedPrecisionName(MixedPrecision precision) {
  switch (precision) {
    case MixedPrecision::kNo:
      return "no";
    case MixedPrecision::kFp16:
      return "fp16";
    case MixedPrecision::kBf16:
      return "bf16";
  }
  return "?";
}

void CheckMixedPrecision(MixedPrecision precision, c10::DeviceType device) {
  TORCH_CHECK(precision == MixedPrecision::kNo || device == c10::kCPU || device == c10::kCUDA,
              "mixed_precision '", MixedPrecisionName(precision), "' is not supported on device ",
              c10::DeviceTypeName(device, /*lower_case=*/true),
              ": use cpu or cuda, or mixed_precision 'no'");
}

AutocastGuard::AutocastGuard(MixedPrecision precision, c10::DeviceType device,
                             const AutocastOptions& options)
    : device_(device),
      was_enabled_(at::autocast::is_autocast_enabled(device)),
      old_dtype_(at::autocast::get_autocast_dtype(device)),
      old_cache_(at::autocast::is_autocast_cache_enabled()) {
  CheckMixedPrecision(precision, device);
  const bool enable = options.enabled && precision != MixedPrecision::kNo;
  if (enable) at::autocast::set_autocast_dtype(device, Dtype(precision));
  at::autocast::set_autocast_enabled(device, enable);
  at::autocast::set_autocast_cache_enabled(options.cache_enabled);
  at::autocast::increment_nesting();
}

AutocastGuard::~AutocastGuard() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, old_dtype_);
  at::autocast::set_autocast_cache_enabled(old_cache_);
}

}  // namespace muster
