#include "worker/models/few_rows_linear.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "ATen/TensorIterator.h"
#include "ATen/autocast_mode.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/linear.h"
#include "c10/core/GradMode.h"
#include "c10/util/BFloat16.h"
#include "torch/library.h"
#include "worker/models/row_products.h"

namespace muster::models {
namespace {

// Smaller weights stay in a cache, so that there is nothing to gain.
constexpr int64_t kSmallWeight = int64_t{1} << 14;

at::Tensor FewRowsLinear(const at::Tensor& x, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias) {
  const int64_t in = weight.size(1), out = weight.size(0);
  const at::Tensor wide_x = x.reshape({-1, in}).to(c10::kFloat).contiguous();
  const at::Tensor wide_bias =
      bias.has_value() && bias->defined() ? bias->to(c10::kFloat).contiguous() : at::Tensor();
  const at::Tensor y = at::empty({wide_x.size(0), out}, wide_x.options());
  const RowProduct product = {
      .rows = wide_x.size(0),
      .in = in,
      .out = out,
      .x = wide_x.const_data_ptr<float>(),
      .bias = wide_bias.defined() ? wide_bias.const_data_ptr<float>() : nullptr,
      .y = y.mutable_data_ptr<float>()};
  const bool is_float = weight.scalar_type() == c10::kFloat;
  const auto* const data = static_cast<const char*>(weight.const_data_ptr());
  // Uses LibTorch's own threads, through the one exported function that runs a loop on them:
  // parallel_for in our code would need an OpenMP runtime beside LibTorch's.
  at::Tensor first = y.select(0, 0);
  auto iterator = at::TensorIteratorConfig()
                      .check_all_same_dtype(false)
                      .resize_outputs(false)
                      .declare_static_shape(first.sizes())
                      .add_output(first)
                      .build();
  const int64_t grain = std::max<int64_t>(1, kSmallWeight / in);
  const char* const start = static_cast<const char*>(first.const_data_ptr());
  // Only the loop of two dimensions is exported; here the second one has size 1, or is a part of
  // the first.
  const auto multiply = [&](char** at, const int64_t* strides, int64_t count, int64_t times) {
    for (int64_t i = 0; i < times; ++i) {
      const int64_t begin = (at[0] + i * strides[1] - start) / static_cast<int64_t>(sizeof(float));
      if (is_float) {
        MultiplyRows(product, reinterpret_cast<const float*>(data), begin, begin + count);
      } else {
        MultiplyRows(product, reinterpret_cast<const uint16_t*>(data), begin, begin + count);
      }
    }
  };
  iterator.for_each(multiply, grain);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = out;
  return y.view(shape).to(x.scalar_type());
}

// An operator, so that weights whose memory is not always present (worker/parallel/paged_storage.h)
// are fetched as for any other operator.
TORCH_LIBRARY(muster, library) {
  library.def("few_rows_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
}
TORCH_LIBRARY_IMPL(muster, CPU, library) { library.impl("few_rows_linear", FewRowsLinear); }

bool IsWorthIt(const at::Tensor& x, const at::Tensor& weight) {
  const c10::ScalarType type = weight.scalar_type();
  return x.is_cpu() && weight.is_cpu() && !c10::GradMode::is_enabled() &&
         (type == c10::kFloat || type == c10::kBFloat16) && x.scalar_type() == type &&
         weight.dim() == 2 && x.dim() > 0 && x.size(-1) == weight.size(1) &&
         weight.is_contiguous() && weight.numel() >= kSmallWeight &&
         x.numel() <= kFewRows * weight.size(1) && x.numel() > 0 &&
         !at::autocast::is_autocast_enabled(at::kCPU);
}

}  // namespace

at::Tensor LinearOf(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const std::optional<at::Tensor> added = bias.defined() ? std::make_optional(bias) : std::nullopt;
  if (!IsWorthIt(x, weight)) return at::linear(x, weight, added);
  static const auto few_rows = c10::Dispatcher::singleton()
                                   .findSchemaOrThrow("muster::few_rows_linear", "")
                                   .typed<at::Tensor(const at::Tensor&, const at::Tensor&,
                                                     const std::optional<at::Tensor>&)>();
  return few_rows.call(x, weight, added);
}

}  // namespace muster::models
