#include "worker/train/clip.h"

#include <cmath>
#include <limits>
#include <memory>
#include <string>

#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "ATen/ops/sparse_coo_tensor.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "ATen/record_function.h"
#include "gtest/gtest.h"
#include "worker/collective/local_comm.h"

namespace muster {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

at::Tensor WithGrad(const at::Tensor& grad) {
  at::Tensor parameter = at::zeros_like(grad);
  parameter.mutable_grad() = grad;
  return parameter;
}

TEST(ClipGradNorm, Norms_AreThoseOfAllElementsTogether) {
  const std::vector<at::Tensor> parameters = {WithGrad(at::tensor({3.0, -4.0})), at::zeros({5}),
                                              WithGrad(at::tensor({12.0})),
                                              WithGrad(at::zeros({0}, at::kDouble))};
  const auto norm = [&](double p) { return TotalNorm(Gradients(parameters), p).item<double>(); };
  EXPECT_DOUBLE_EQ(norm(1), 19);
  EXPECT_DOUBLE_EQ(norm(2), 13);
  EXPECT_NEAR(norm(3), std::cbrt(27 + 64 + 1728), 1e-9);
  EXPECT_DOUBLE_EQ(norm(kInf), 12);
  EXPECT_NEAR(norm(0.5), std::pow(std::sqrt(3) + 2 + std::sqrt(12), 2), 1e-9);
  EXPECT_DOUBLE_EQ(norm(-kInf), 3);
  EXPECT_NEAR(norm(-1), 1 / (1.0 / 3 + 1.0 / 4 + 1.0 / 12), 1e-12);
  EXPECT_DOUBLE_EQ(norm(0), 2) << "torch counts the tensors that are not zero";
}

TEST(ClipGradNorm, AboveTheLimit_IsScaledDownBelowItIsKept) {
  const std::vector<at::Tensor> parameters = {WithGrad(at::tensor({3.0f, 4.0f}))};
  EXPECT_FLOAT_EQ(ClipGradNorm(parameters, 10).item<float>(), 5);
  EXPECT_FLOAT_EQ(parameters[0].grad()[1].item<float>(), 4);
  EXPECT_FLOAT_EQ(ClipGradNorm(parameters, 1).item<float>(), 5);
  EXPECT_NEAR(parameters[0].grad()[1].item<float>(), 0.8, 1e-6);
}

TEST(ClipGradNorm, MixedDtypes_ShareOneNorm) {
  const std::vector<at::Tensor> parameters = {WithGrad(at::tensor({3.0f})),
                                              WithGrad(at::tensor({4.0}))};
  EXPECT_DOUBLE_EQ(ClipGradNorm(parameters, 1).item<double>(), 5);
  EXPECT_NEAR(parameters[0].grad().item<double>(), 0.6, 1e-6);
  EXPECT_NEAR(parameters[1].grad().item<double>(), 0.8, 1e-6);
}

TEST(ClipGradNorm, NothingToClip_IsZero) {
  EXPECT_EQ(ClipGradNorm({}, 1).item<double>(), 0);
  EXPECT_EQ(ClipGradNorm({at::zeros({2})}, 1).item<double>(), 0);
}

TEST(ClipGradNorm, NonFinite_FlowsThroughUnlessAnErrorIsAsked) {
  const std::vector<at::Tensor> parameters = {WithGrad(at::tensor({1.0, kInf}))};
  EXPECT_THROW(ClipGradNorm(parameters, 1, 2, /*error_if_nonfinite=*/true), c10::Error);
  EXPECT_EQ(ClipGradNorm(parameters, 1).item<double>(), kInf);
  EXPECT_EQ(parameters[0].grad()[0].item<double>(), 0);
  EXPECT_TRUE(std::isnan(parameters[0].grad()[1].item<double>()));
}

TEST(ClipGradNorm, BadArguments_AreNamed) {
  EXPECT_THROW(ClipGradNorm({}, -1), c10::Error);
  EXPECT_THROW(ClipGradNorm({}, 1, std::nan("")), c10::Error);
  EXPECT_THROW(ClipGradValue({}, -1), c10::Error);
}

TEST(ClipGradValue, Elements_AreCut) {
  const std::vector<at::Tensor> parameters = {WithGrad(at::tensor({-3.0, 0.5, 9.0})),
                                              at::zeros({1})};
  ClipGradValue(parameters, 1);
  EXPECT_TRUE(parameters[0].grad().equal(at::tensor({-1.0, 0.5, 1.0})));
}

TEST(ScaleGradients, Factor_MultipliesInPlace) {
  const std::vector<at::Tensor> parameters = {WithGrad(at::tensor({2.0}))};
  const void* storage = parameters[0].grad().data_ptr();
  ScaleGradients(parameters, 1.5);
  EXPECT_EQ(parameters[0].grad().item<double>(), 3);
  EXPECT_EQ(parameters[0].grad().data_ptr(), storage);
}

// Row 0 twice: its gradient is 3 + 4, which norms and limits must use.
at::Tensor WithSparseGrad() {
  at::Tensor parameter = at::zeros({4, 1});
  parameter.mutable_grad() =
      at::sparse_coo_tensor(at::tensor({0, 2, 0}, at::kLong).view({1, 3}),
                            at::tensor({3.0f, 24.0f, 4.0f}).view({3, 1}), {4, 1});
  return parameter;
}

TEST(Clip, SparseGradients_AreClippedAsTheirDenseOnes) {
  const at::Tensor p = WithSparseGrad();
  EXPECT_FLOAT_EQ(ClipGradNorm({p}, 5).item<float>(), 25);
  EXPECT_NEAR(p.grad().to_dense()[0].item<float>(), 1.4, 1e-5);
  EXPECT_NEAR(p.grad().to_dense()[2].item<float>(), 4.8, 1e-5);
  EXPECT_THROW(ClipGradNorm({p}, 5, -kInf), c10::Error);

  const at::Tensor q = WithSparseGrad();
  ClipGradValue({q}, 5);
  EXPECT_FLOAT_EQ(q.grad().to_dense()[0].item<float>(), 5) << "3 and 4 are each below the limit";

  const at::Tensor r = WithSparseGrad();
  ScaleGradients({r}, 0.5);
  EXPECT_FLOAT_EQ(r.grad().to_dense()[0].item<float>(), 3.5);
  EXPECT_FLOAT_EQ(r.grad().to_dense()[2].item<float>(), 12);
}

// Counts the operators of this thread that copy values from one device to another: if one of these
// is a GPU, the program waits for it.
class TransferWatch {
 public:
  TransferWatch() {
    count = 0;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function) {
          const std::string name = function.name();
          if (name == "aten::_local_scalar_dense") ++count;
          if (name == "aten::copy_" && function.inputs()[0].toTensor().device() !=
                                           function.inputs()[1].toTensor().device()) {
            ++count;
          }
          return std::unique_ptr<at::ObserverContext>();
        })
            .needsInputs(true)
            .scopes({at::RecordScope::FUNCTION}));
  }
  ~TransferWatch() { at::removeCallback(handle_); }
  static int count;

 private:
  at::CallbackHandle handle_;
};
int TransferWatch::count = 0;

TEST(Clip, Shards_AreClippedWhereTheyAre) {
  // Tensors on a device without values.
  const auto shard = [] { return WithGrad(at::empty({8}, at::kMeta)); };
  LocalComm comm;
  for (const double norm_type : {2.0, kInf}) {
    for (const auto& [parameters, shards] :
         {std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>({}, {shard(), shard()}),
          {{shard()}, {shard()}},
          {{}, {at::empty({0}, at::kMeta)}}}) {
      const TransferWatch watch;
      EXPECT_TRUE(ClipGradNorm(parameters, shards, comm, 1, norm_type).is_meta());
      EXPECT_EQ(TransferWatch::count, 0);
    }
  }
}

TEST(Clip, TiedWeight_CountsOnce) {
  const at::Tensor tied = WithGrad(at::tensor({3.0f, 4.0f}));
  EXPECT_FLOAT_EQ(ClipGradNorm({tied, tied}, 2.5).item<float>(), 5);
  EXPECT_NEAR(tied.grad()[0].item<float>(), 1.5, 1e-5);
  ScaleGradients({tied, tied}, 2);
  EXPECT_NEAR(tied.grad()[0].item<float>(), 3, 1e-5);
}

}  // namespace
}  // namespace muster
