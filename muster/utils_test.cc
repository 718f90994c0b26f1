#include "muster/utils.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Functions.h"
#include "torch/nn/modules/linear.h"

namespace muster {
namespace {

TEST(SetSeed, DeviceSpecific_AddsTheNumberOfTheProcess) {
  const auto draw = [] { return at::rand({4}); };
  set_seed(7);
  const at::Tensor seven = draw();
  set_seed(8);
  const at::Tensor eight = draw();
  setenv("MUSTER_RANK", "1", 1);
  setenv("MUSTER_WORLD_SIZE", "2", 1);
  setenv("MUSTER_COORDINATOR", "127.0.0.1:1", 1);
  set_seed(7);
  EXPECT_TRUE(at::equal(draw(), seven));
  set_seed(7, /*device_specific=*/true);
  EXPECT_TRUE(at::equal(draw(), eight));
  unsetenv("MUSTER_RANK");
  unsetenv("MUSTER_WORLD_SIZE");
  // Its place is given at the rendezvous only.
  EXPECT_THROW(set_seed(7, true), c10::Error);
  unsetenv("MUSTER_COORDINATOR");
}

TEST(SynchronizeRngStates, UnknownKind_IsNamed) {
  AcceleratorOptions options;
  options.cpu = true;
  Accelerator accelerator(options);
  synchronize_rng_states(accelerator);
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(3);
  synchronize_rng_states(accelerator, generator);
  EXPECT_THROW(synchronize_rng_states(accelerator, {"numpy"}), c10::Error);
}

TEST(Structures, AcceleratesWords_DoWhatTheySay) {
  using Nest = std::tuple<at::Tensor, std::map<std::string, at::Tensor>>;
  const Nest nest(at::ones({3, 2}, at::kHalf), {{"ids", at::arange(3)}});
  EXPECT_EQ(find_batch_size(nest), 3);
  EXPECT_THROW(find_batch_size(std::vector<at::Tensor>()), c10::Error);
  EXPECT_EQ(std::get<1>(slice_tensors(nest, 1, 3)).at("ids").size(0), 2);
  EXPECT_EQ(std::get<0>(concatenate(std::vector<Nest>{nest, nest})).size(0), 6);
  EXPECT_EQ(std::get<0>(pad_input_tensors(nest, 3, 2)).size(0), 4);
  EXPECT_EQ(std::get<0>(convert_to_fp32(nest)).scalar_type(), at::kFloat);
  EXPECT_EQ(std::get<1>(convert_to_fp32(nest)).at("ids").scalar_type(), at::kLong);
  EXPECT_EQ(std::get<0>(send_to_device(nest, at::kCPU)).device().type(), at::kCPU);
  auto forward = convert_outputs_to_fp32([](const at::Tensor& x) { return x.to(at::kBFloat16); });
  EXPECT_EQ(forward(at::ones({2})).scalar_type(), at::kFloat);
}

TEST(SkipFirstBatches, Alone_LeavesTheRest) {
  AcceleratorOptions options;
  options.cpu = true;
  Accelerator accelerator(options);
  auto loader = accelerator.prepare(batches(TensorDataset(at::arange(10)), 2));
  std::vector<int64_t> first;
  for (auto& batch : skip_first_batches(loader, 3)) {
    first.push_back(batch.value()[0].template item<int64_t>());
  }
  EXPECT_EQ(first, (std::vector<int64_t>{6, 8}));
}

TEST(LocalSgd, OneProcess_DoesNothing) {
  AcceleratorOptions options;
  options.cpu = true;
  Accelerator accelerator(options);
  auto model = accelerator.prepare(torch::nn::Linear(1, 1));
  LocalSGD local(accelerator, model, 1);
  EXPECT_FALSE(local.step());
}

TEST(GetLogger, Lines_CarryTheRank) {
  AcceleratorOptions options;
  options.cpu = true;
  Accelerator accelerator(options);
  auto logger = get_logger(accelerator);
  testing::internal::CaptureStderr();
  logger.Info("hello");
  EXPECT_NE(testing::internal::GetCapturedStderr().find("[RANK 0] hello"), std::string::npos);
}

}  // namespace
}  // namespace muster
