#include "worker/bigmodel/dispatch.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"
#include "base/test_system_calls.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/nn/init.h"
#include "worker/bigmodel/empty_weights.h"
#include "worker/bigmodel/module_description.h"
#include "worker/bigmodel/offload_ring.h"
#include "worker/bigmodel/test_nets.h"
#include "worker/checkpoint/model_files.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/test_huge_file.h"
#include "worker/collective/test_error.h"
#include "worker/train/guard.h"

namespace muster {
namespace {

// The file that replaces the next offload.safetensors as soon as that gets its name.
std::string replaced_by;

}  // namespace
}  // namespace muster

// The program's own rename(), in place of the C library's.
extern "C" int rename(const char* from, const char* to) noexcept {
  static const auto real = muster::RealCall<int (*)(const char*, const char*)>("rename");
  const int result = real(from, to);
  const bool publishes = muster::PathHas(to, "offload.safetensors") && !muster::replaced_by.empty();
  if (!publishes) return result;
  return real(std::exchange(muster::replaced_by, "").c_str(), to);
}

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int64_t kVocabulary = 50, kWidth = 64, kBlocks = 4;

TextNet Net(bool tied = false) { return TextNet(kVocabulary, kWidth, kBlocks, tied); }
TextNet EmptyNet(bool tied = false) {
  return InitEmptyWeights([tied] { return Net(tied); });
}

at::Tensor Ids() { return at::arange(0, 24).remainder(kVocabulary).view({2, 12}); }

at::Tensor Compute(const TextNet& net) {
  const at::NoGradGuard no_grad;
  return TextNet(net)->forward(Ids());
}

std::string Text(const absl::Status& status) { return std::string(status.message()); }

// A saved model and its results.
class Dispatch : public testing::Test {
 protected:
  Dispatch() : whole_(Net()), expected_(Compute(whole_)) {
    EXPECT_TRUE(SaveModelFiles(folder_.path(), TensorsOf(*whole_), 40'000).ok());
  }

  absl::StatusOr<DispatchedModel> Load(const TextNet& net, const DeviceEntries& map,
                                       const LoadCheckpointOptions& options = {}) {
    return LoadCheckpointAndDispatch(*TextNet(net), folder_.path(), map, options);
  }
  std::string Error(const DeviceEntries& map, const LoadCheckpointOptions& options = {}) {
    const TextNet net = EmptyNet();
    return Text(Load(net, map, options).status());
  }

  const TestFolder folder_;
  const TextNet whole_;
  const at::Tensor expected_;
};

LoadCheckpointOptions Ring(uint64_t bytes) {
  LoadCheckpointOptions options;
  options.dispatch.ring_bytes = bytes;
  return options;
}

TEST_F(Dispatch, Placements_ComputeTheSameBits) {
  const std::vector<DeviceEntries> maps = {{},
                                           {{"", "cpu"}},
                                           {{"", "disk"}},
                                           {{"", "disk"}, {"layers.1", "cpu"}, {"head", "cpu"}},
                                           {{"embed", "cpu"},
                                            {"head", "disk"},
                                            {"norm", "disk"},
                                            {"layers", "disk"},
                                            {"layers.3.up.weight", "cpu"}}};
  for (const DeviceEntries& map : maps) {
    for (const uint64_t ring : {uint64_t{66'000}, uint64_t{100'000}, uint64_t{10} << 20}) {
      const TextNet net = EmptyNet();
      const auto dispatched = Load(net, map, Ring(ring));
      ASSERT_TRUE(dispatched.ok()) << dispatched.status();
      EXPECT_THAT(dispatched->loaded().missing, IsEmpty());
      for (int pass = 0; pass < 3; ++pass) EXPECT_TRUE(at::equal(Compute(net), expected_)) << ring;
    }
  }
}

LoadCheckpointOptions Mapped(std::optional<uint64_t> ring = std::nullopt) {
  LoadCheckpointOptions options;
  options.dispatch.ring_bytes = ring;
  options.dispatch.mmap = true;
  return options;
}

TEST_F(Dispatch, Mmap_ComputesTheSameBitsWithoutARing) {
  const std::vector<DeviceEntries> maps = {{{"", "disk"}},
                                           {{"", "disk"}, {"layers.1", "cpu"}, {"head", "cpu"}}};
  for (const DeviceEntries& map : maps) {
    for (const bool prefetch : {true, false}) {
      LoadCheckpointOptions options = Mapped();
      options.dispatch.prefetch = prefetch;
      const TextNet net = EmptyNet();
      const auto dispatched = Load(net, map, options);
      ASSERT_TRUE(dispatched.ok()) << dispatched.status();
      for (int pass = 0; pass < 3; ++pass) EXPECT_TRUE(at::equal(Compute(net), expected_));
      const OffloadStats stats = dispatched->stats();
      EXPECT_GT(stats.mapped_bytes, 100'000u);
      EXPECT_EQ(stats.mapped_bytes, stats.offloaded_bytes);
      EXPECT_EQ(stats.ring_bytes, 0u);
      EXPECT_EQ(stats.read_bytes, 0u);
      EXPECT_EQ(stats.overflow_bytes, 0u);
    }
  }
}

TEST_F(Dispatch, MmapOfNumbersThatAreConverted_PassThroughTheRing) {
  // Two blocks have another type than the model's.
  NamedTensors tensors;
  for (const auto& [name, tensor] : TensorsOf(*whole_)) {
    const bool other = name.starts_with("layers.1.") || name.starts_with("layers.2.");
    tensors.emplace_back(name, other ? tensor.detach().to(at::kBFloat16) : tensor.detach());
  }
  const TestFolder folder;
  ASSERT_TRUE(SaveModelFiles(folder.path(), tensors).ok());
  const auto compute = [&](const LoadCheckpointOptions& options, OffloadStats* stats) {
    const TextNet net = EmptyNet();
    const auto dispatched =
        LoadCheckpointAndDispatch(*TextNet(net), folder.path(), {{"", "disk"}}, options);
    EXPECT_TRUE(dispatched.ok()) << dispatched.status();
    Compute(net);
    const at::Tensor result = Compute(net);
    *stats = dispatched->stats();
    return result;
  };
  OffloadStats copied, mapped, all_converted;
  const at::Tensor expected = compute(Ring(70'000), &copied);
  EXPECT_TRUE(at::equal(compute(Mapped(70'000), &mapped), expected));
  EXPECT_EQ(copied.mapped_bytes, 0u);
  EXPECT_GT(mapped.mapped_bytes, mapped.offloaded_bytes / 3);
  EXPECT_LT(mapped.mapped_bytes, mapped.offloaded_bytes * 2 / 3);
  EXPECT_GT(mapped.read_bytes, 0u);
  EXPECT_GT(mapped.ring_bytes, 60'000u);
  EXPECT_LE(mapped.ring_bytes, 74'000u);
  LoadCheckpointOptions in_double = Mapped();
  in_double.weights.dtype = at::kDouble;
  in_double.keep_buffers = true;
  const TextNet net = EmptyNet();
  const auto dispatched =
      LoadCheckpointAndDispatch(*TextNet(net), folder.path(), {{"", "disk"}}, in_double);
  ASSERT_TRUE(dispatched.ok()) << dispatched.status();
  EXPECT_EQ(dispatched->stats().mapped_bytes, 0u);
}

TEST_F(Dispatch, MmapOfDiskOffload_ComputesTheSameBits) {
  const TestFolder folder;
  const TextNet net = Net();
  {
    const at::NoGradGuard no_grad;
    const auto from = whole_->named_parameters();
    for (const auto& to : net->named_parameters()) to.value().copy_(from[to.key()]);
  }
  const auto dispatched = DiskOffload(*TextNet(net), folder.path(), at::kCPU, {.mmap = true});
  ASSERT_TRUE(dispatched.ok()) << dispatched.status();
  EXPECT_EQ(dispatched->stats().mapped_bytes, dispatched->stats().offloaded_bytes);
  EXPECT_TRUE(at::equal(Compute(net), expected_));
  // At addresses for which MKL guarantees the same bits as with memory of its own.
  const at::NoGradGuard no_grad;
  for (const auto& parameter : net->named_parameters()) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(parameter.value().const_data_ptr()) % 64, 0u)
        << parameter.key();
  }
}

TEST_F(Dispatch, WritesIntoMappedWeights_AreRefusedAndLeaveTheFile) {
  const TestFolder folder;
  ASSERT_TRUE(SaveModelFiles(folder.path(), TensorsOf(*whole_)).ok());
  const std::string path = folder.Path("model.safetensors");
  const auto before = ReadFile(path);
  ASSERT_TRUE(before.ok()) << before.status();
  TextNet net = EmptyNet();
  const auto dispatched = LoadCheckpointAndDispatch(*net, folder.path(), {{"", "disk"}}, Mapped());
  ASSERT_TRUE(dispatched.ok()) << dispatched.status();
  EXPECT_THAT(ErrorOf([&] { net->forward(Ids()); }),
              HasSubstr("'embed.weight', which is offloaded and requires a gradient"));
  const at::NoGradGuard no_grad;
  at::Tensor weight = net->embed->weight;
  at::Tensor down = net->layers[2]->as<BlockImpl>()->down->weight;
  EXPECT_TRUE(at::equal(Compute(net), expected_));
  for (const auto& write : std::vector<std::function<void()>>{
           [&] { weight.add_(1); }, [&] { down.zero_(); }, [&] { weight.detach().fill_(2); },
           [&] { torch::nn::init::normal_(down); }, [&] { weight.data().mul_(3); },
           [&] { down.view({-1})[3] = 7; }, [&] { weight.copy_(at::ones_like(weight)); },
           [&] { at::add_out(down, at::ones_like(down), 1); }}) {
    EXPECT_THAT(ErrorOf(write), HasSubstr("which is offloaded"));
  }
  EXPECT_TRUE(at::equal(Compute(net), expected_));
  EXPECT_EQ(*ReadFile(path), *before);
}

// Without a signal, also for weights that were loaded ahead.
TEST_F(Dispatch, MappedFileThatIsChangedBetweenPasses_IsNamedAndNothingCrashes) {
  for (const bool cut : {true, false}) {
    const TestFolder folder;
    const std::string path = folder.Path("model.safetensors");
    ASSERT_TRUE(SaveModelFiles(folder.path(), TensorsOf(*whole_)).ok());
    TextNet net = EmptyNet();
    const auto dispatched =
        LoadCheckpointAndDispatch(*net, folder.path(), {{"", "disk"}}, Mapped());
    ASSERT_TRUE(dispatched.ok()) << dispatched.status();
    EXPECT_TRUE(at::equal(Compute(net), expected_));
    dispatched->ring()->WaitUntilIdle();
    if (cut) {
      ASSERT_EQ(truncate(path.c_str(), 100'000), 0);
    } else {
      const timespec times[2] = {{.tv_sec = 1, .tv_nsec = 0}, {.tv_sec = 1, .tv_nsec = 0}};
      ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
    }
    for (int pass = 0; pass < 2; ++pass) {
      const absl::Status status = Guard([&] { Compute(net); });
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << cut;
      EXPECT_THAT(Text(status), AllOf(HasSubstr("model.safetensors: tensor \""),
                                      HasSubstr("it was changed while it is used")));
    }
  }
}

TEST_F(Dispatch, ThreadsOverAMappedModel_AllComputeTheSameBits) {
  const TextNet net = EmptyNet();
  const auto dispatched = Load(net, {{"", "disk"}}, Mapped());
  ASSERT_TRUE(dispatched.ok()) << dispatched.status();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int pass = 0; pass < 5; ++pass) EXPECT_TRUE(at::equal(Compute(net), expected_));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(Dispatch, OffloadFromMemory_ComputesTheSameBits) {
  const TextNet on_host = Net();
  const auto copy = [&] {
    const at::NoGradGuard no_grad;
    const auto from = whole_->named_parameters();
    for (const auto& to : on_host->named_parameters()) to.value().copy_(from[to.key()]);
  };
  copy();
  {
    const auto offloaded = CpuOffload(*TextNet(on_host), at::kCPU, {.ring_bytes = 70'000});
    ASSERT_TRUE(offloaded.ok()) << offloaded.status();
    EXPECT_GT(offloaded->stats().offloaded_bytes, 500'000u);
    EXPECT_TRUE(at::equal(Compute(on_host), expected_));
  }
  EXPECT_THAT(ErrorOf([&] { Compute(on_host); }), HasSubstr("what holds its values is gone"));
}

// The first error of the map is found before anything has changed.
TEST_F(Dispatch, OffloadWithATooSmallRing_LeavesTheFileOfAnEarlierModel) {
  const TestFolder offload;
  TextNet earlier = Net(), later = Net();
  const at::Tensor expected = Compute(earlier);
  const auto offloaded = DiskOffload(*earlier, offload.path(), at::kCPU);
  ASSERT_TRUE(offloaded.ok()) << offloaded.status();
  const auto refused = DiskOffload(*later, offload.path(), at::kCPU, {.ring_bytes = 100});
  EXPECT_THAT(Text(refused.status()), HasSubstr("raise ring_bytes"));
  EXPECT_TRUE(PathExists(offload.Path("offload.safetensors")));
  EXPECT_TRUE(at::equal(Compute(earlier), expected));
}

TEST_F(Dispatch, OffloadThatCannotWrite_MovesNothing) {
  TextNet net = Net();
  // Buffers go to the main device, which here is one that differs from theirs.
  const auto refused = DiskOffload(*net, "/dev/null/folder", at::kMeta);
  EXPECT_THAT(Text(refused.status()), HasSubstr("cannot offload"));
  for (const auto& [name, tensor] : TensorsOf(*net)) EXPECT_TRUE(tensor.is_cpu()) << name;
}

// D17: files of an earlier offload do not remain beside the new ones.
TEST_F(Dispatch, D17_DiskOffloadTwice_LeavesOneFile) {
  const TestFolder offload;
  for (const bool tied : {false, true}) {
    TextNet net = Net(tied);
    const at::Tensor expected = Compute(net);
    const auto offloaded = DiskOffload(*net, offload.path(), at::kCPU, {.ring_bytes = 70'000});
    ASSERT_TRUE(offloaded.ok()) << offloaded.status();
    EXPECT_TRUE(at::equal(Compute(net), expected));
    const auto files = ListDirectory(offload.path());
    ASSERT_TRUE(files.ok());
    EXPECT_THAT(*files, ElementsAre("offload.safetensors"));
  }
}

// Like another process that offloads into the same folder.
TEST_F(Dispatch, OffloadFileThatIsReplacedBeforeItIsOpened_IsAnErrorAndStays) {
  const TestFolder other_folder;
  TextNet other = Net();
  ASSERT_TRUE(DiskOffload(*other, other_folder.path(), at::kCPU).ok());
  for (const bool same_names : {true, false}) {
    for (const bool has_earlier : {false, true}) {
      SCOPED_TRACE(absl::StrCat(same_names, has_earlier));
      const TestFolder offload;
      const std::string path = offload.Path("offload.safetensors");
      if (has_earlier) {
        TextNet earlier = Net();
        ASSERT_TRUE(DiskOffload(*earlier, offload.path(), at::kCPU).ok());
      }
      const std::string theirs = offload.Path("theirs");
      if (same_names) {
        ASSERT_TRUE(
            WriteFileAtomically(theirs, *ReadFile(other_folder.Path("offload.safetensors"))).ok());
      } else {
        ASSERT_TRUE(WriteSafetensors(theirs, {{"w", at::ones({3})}}).ok());
      }
      const std::string bytes = *ReadFile(theirs);
      TextNet net = Net();
      const at::Tensor expected = Compute(net);
      replaced_by = theirs;
      const auto offloaded = DiskOffload(*net, offload.path(), at::kCPU);
      EXPECT_TRUE(replaced_by.empty());
      EXPECT_THAT(Text(offloaded.status()),
                  AllOf(HasSubstr("another process has replaced"), HasSubstr(path)));
      EXPECT_TRUE(at::equal(Compute(net), expected));
      EXPECT_THAT(*ListDirectory(offload.path()), ElementsAre("offload.safetensors"));
      EXPECT_EQ(*ReadFile(path), bytes);
    }
  }
}

// Files that a killed process has kept of an earlier model. A live process holds a lock on its
// file.
TEST_F(Dispatch, LeftoversOfKilledProcesses_AreRemovedByTheNextOffload) {
  const TestFolder offload;
  const std::string mine = offload.Path("offload.safetensors.earlier.7");
  for (const char* const name : {"offload.safetensors.earlier.7", "offload.safetensors.earlier.8",
                                 "offload.safetensors.other"}) {
    ASSERT_TRUE(WriteFileAtomically(offload.Path(name), "x").ok());
  }
  const OwnedFd live(open(mine.c_str(), O_RDONLY | O_CLOEXEC));
  ASSERT_EQ(flock(live.get(), LOCK_SH), 0);
  TextNet net = Net();
  ASSERT_TRUE(DiskOffload(*net, offload.path(), at::kCPU).ok());
  EXPECT_THAT(*ListDirectory(offload.path()),
              testing::UnorderedElementsAre("offload.safetensors", "offload.safetensors.earlier.7",
                                            "offload.safetensors.other"));
}

TEST_F(Dispatch, OtherType_IsTheSameOnDiskAsInMemory) {
  LoadCheckpointOptions options = Ring(70'000);
  options.weights.dtype = at::kBFloat16;
  const TextNet resident = EmptyNet(), streamed = EmptyNet();
  const auto a = Load(resident, {{"", "cpu"}}, options);
  const auto b = Load(streamed, {{"", "disk"}}, options);
  ASSERT_TRUE(a.ok()) << a.status();
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_EQ(resident->head_weight.scalar_type(), at::kBFloat16);
  const at::Tensor bits = Compute(resident);
  EXPECT_EQ(bits.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(at::equal(Compute(streamed), bits));
  EXPECT_EQ(b->resident()[0].second, kBlocks * kWidth * 2) << "the buffers";
}

TEST_F(Dispatch, TiedWeights_AreThereOnce) {
  const TextNet tied = Net(/*tied=*/true);
  const at::Tensor expected = Compute(tied);
  const TestFolder folder;
  ASSERT_TRUE(SaveModelFiles(folder.path(), TensorsOf(*tied)).ok());
  for (const char* const device : {"cpu", "disk"}) {
    const TextNet net = EmptyNet(/*tied=*/true);
    const auto dispatched =
        LoadCheckpointAndDispatch(*TextNet(net), folder.path(), {{"", device}}, Ring(70'000));
    ASSERT_TRUE(dispatched.ok()) << dispatched.status();
    EXPECT_TRUE(net->head_weight.is_same(net->embed->weight));
    EXPECT_TRUE(at::equal(Compute(net), expected));
    const uint64_t once = (kVocabulary * kWidth + kBlocks * (8 * kWidth * kWidth + 8 * kWidth)) * 4;
    EXPECT_LT(dispatched->stats().offloaded_bytes, once + 20'000);
  }
}

// D15: a plan that divides modules includes their own buffers, and can be carried out.
TEST_F(Dispatch, D15_PlanThatDividesBlocks_IsCarriedOut) {
  for (int64_t limit = 150'000; limit < 900'000; limit += 90'000) {
    const TextNet net = EmptyNet();
    DevicePlanOptions plan;
    plan.max_memory = {{"cpu", static_cast<double>(limit)}};
    const auto map = PlanDevices(*net, "auto", plan);
    ASSERT_TRUE(map.ok()) << map.status();
    LoadCheckpointOptions options;
    options.dispatch.max_memory = plan.max_memory;
    options.dispatch.offload_buffers = true;
    const auto dispatched = Load(net, map->devices, options);
    ASSERT_TRUE(dispatched.ok()) << dispatched.status();
    EXPECT_TRUE(at::equal(Compute(net), expected_)) << limit;
    double resident = 0;
    for (const auto& [device, bytes] : dispatched->resident()) resident += bytes;
    EXPECT_LE(resident, limit);
  }
}

// D16: strict reports what is missing, in memory as on the disk.
TEST_F(Dispatch, D16_MissingAndUnexpectedNames_AreListed) {
  const TestFolder folder;
  NamedTensors tensors = TensorsOf(*whole_);
  std::erase_if(tensors, [](const auto& item) { return item.first == "layers.2.up.bias"; });
  tensors.emplace_back("extra", at::ones({1}));
  ASSERT_TRUE(SaveModelFiles(folder.path(), tensors).ok());
  for (const char* const device : {"cpu", "disk"}) {
    TextNet net = EmptyNet();
    const auto strict = LoadCheckpointAndDispatch(*net, folder.path(), {{"", device}});
    EXPECT_EQ(strict.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(Text(strict.status()),
                AllOf(HasSubstr("missing: layers.2.up.bias"), HasSubstr("unexpected: extra")));
    for (const at::Tensor& parameter : net->parameters()) EXPECT_TRUE(parameter.is_meta());
    LoadCheckpointOptions options;
    options.weights.strict = false;
    net = Net();
    const at::Tensor bias = net->layers->named_parameters()["2.up.bias"].detach().clone();
    const auto loose = LoadCheckpointAndDispatch(*net, folder.path(), {{"", device}}, options);
    ASSERT_TRUE(loose.ok()) << loose.status();
    EXPECT_THAT(loose->loaded().missing, ElementsAre("layers.2.up.bias"));
    EXPECT_THAT(loose->loaded().unexpected, ElementsAre("extra"));
    EXPECT_TRUE(at::equal(net->layers->named_parameters()["2.up.bias"], bias));
    EXPECT_TRUE(Compute(net).defined());
  }
}

// Like Accelerate, whose dispatch refuses a tensor of the meta device, because the forward pass
// cannot tell which one it is.
TEST_F(Dispatch, WhatNeitherFilesNorModelHave_IsNamedAlsoWithoutStrict) {
  const TestFolder folder;
  NamedTensors tensors = TensorsOf(*whole_);
  std::erase_if(tensors, [](const auto& item) {
    return item.first == "layers.2.up.bias" || item.first == "norm.weight";
  });
  ASSERT_TRUE(SaveModelFiles(folder.path(), tensors).ok());
  LoadCheckpointOptions options;
  options.weights.strict = false;
  for (const char* const device : {"cpu", "disk"}) {
    TextNet net = EmptyNet();
    const auto loaded = LoadCheckpointAndDispatch(*net, folder.path(), {{"", device}}, options);
    EXPECT_EQ(loaded.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(Text(loaded.status()),
                AllOf(HasSubstr(folder.path()), HasSubstr("layers.2.up.bias"),
                      HasSubstr("norm.weight"), HasSubstr("without init_empty_weights()")));
    for (const at::Tensor& parameter : net->parameters()) EXPECT_TRUE(parameter.is_meta());
  }
  // Also for a tensor of another shape.
  for (auto& [name, tensor] : tensors) {
    if (name == "layers.1.up.bias") tensor = at::ones({1});
  }
  const TestFolder other;
  ASSERT_TRUE(SaveModelFiles(other.path(), tensors).ok());
  options.weights.skip_mismatched = true;
  TextNet net = EmptyNet();
  EXPECT_THAT(Text(LoadCheckpointAndDispatch(*net, other.path(), {{"", "cpu"}}, options).status()),
              HasSubstr("layers.1.up.bias"));
}

TEST_F(Dispatch, NoReadersOrThousands_AreRefused) {
  for (const int readers : {0, -1, 1025, std::numeric_limits<int>::max()}) {
    SCOPED_TRACE(readers);
    const std::string expected = absl::StrCat("readers is ", readers, ": ");
    LoadCheckpointOptions options;
    options.dispatch.readers = readers;
    EXPECT_THAT(Error({{"", "disk"}}, options), HasSubstr(expected));
    EXPECT_THAT(Error({{"", "cpu"}}, options), HasSubstr(expected));
    TextNet net = Net();
    const auto offloaded = CpuOffload(*net, at::kCPU, {.readers = readers});
    EXPECT_EQ(offloaded.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(Text(offloaded.status()), HasSubstr(expected));
  }
}

TEST_F(Dispatch, KeepBuffers_NeedsNoTablesInTheFile) {
  const TestFolder folder;
  NamedTensors tensors = TensorsOf(*whole_);
  std::erase_if(tensors, [](const auto& item) { return item.first.ends_with("table"); });
  ASSERT_TRUE(SaveModelFiles(folder.path(), tensors).ok());
  TextNet net = EmptyNet();
  LoadCheckpointOptions options = Ring(70'000);
  EXPECT_THAT(
      Text(LoadCheckpointAndDispatch(*net, folder.path(), {{"", "disk"}}, options).status()),
      HasSubstr("missing: layers.0.table"));
  options.keep_buffers = true;
  const auto dispatched = LoadCheckpointAndDispatch(*net, folder.path(), {{"", "disk"}}, options);
  ASSERT_TRUE(dispatched.ok()) << dispatched.status();
  EXPECT_EQ(dispatched->loaded().missing.size(), static_cast<size_t>(kBlocks));
  EXPECT_TRUE(at::equal(Compute(net), expected_));
}

// In bfloat16 the tables of a rotary embedding mean nothing after a few hundred positions.
TEST_F(Dispatch, KeptBuffers_KeepTheirTypeToo) {
  const TestFolder folder;
  NamedTensors tensors = TensorsOf(*whole_);
  std::erase_if(tensors, [](const auto& item) { return item.first.ends_with("table"); });
  ASSERT_TRUE(SaveModelFiles(folder.path(), tensors).ok());
  for (const DeviceEntries& map : {DeviceEntries{{"", "cpu"}}, DeviceEntries{{"", "disk"}}}) {
    for (const bool offload_buffers : {false, true}) {
      TextNet net = EmptyNet();
      LoadCheckpointOptions options = Ring(70'000);
      options.weights.dtype = at::kBFloat16;
      options.keep_buffers = true;
      options.dispatch.offload_buffers = offload_buffers;
      const auto dispatched = LoadCheckpointAndDispatch(*net, folder.path(), map, options);
      ASSERT_TRUE(dispatched.ok()) << dispatched.status();
      for (const auto& buffer : whole_->named_buffers()) {
        EXPECT_TRUE(at::equal(net->named_buffers()[buffer.key()], buffer.value())) << buffer.key();
      }
      EXPECT_EQ(net->embed->weight.scalar_type(), at::kBFloat16);
    }
  }
}

// Also offloaded buffers: tensors that no file has can only stay.
TEST_F(Dispatch, OffloadedTablesThatNoFileHas_StayInMemory) {
  const TestFolder folder;
  NamedTensors tensors = TensorsOf(*whole_);
  std::erase_if(tensors, [](const auto& item) { return item.first.ends_with("table"); });
  ASSERT_TRUE(SaveModelFiles(folder.path(), tensors).ok());
  TextNet net = EmptyNet();
  LoadCheckpointOptions options = Ring(70'000);
  options.keep_buffers = options.dispatch.offload_buffers = true;
  const auto dispatched = LoadCheckpointAndDispatch(*net, folder.path(), {{"", "disk"}}, options);
  ASSERT_TRUE(dispatched.ok()) << dispatched.status();
  EXPECT_EQ(dispatched->resident()[0].second, kBlocks * kWidth * 4);
  EXPECT_TRUE(at::equal(Compute(net), expected_));
}

TEST_F(Dispatch, TensorsWithoutElements_AreOnTheDevice) {
  struct Nothing : torch::nn::Module {
    Nothing() { weight = register_parameter("weight", at::ones({0, 4})); }
    at::Tensor weight;
  };
  const TestFolder folder;
  ASSERT_TRUE(SaveModelFiles(folder.path(), TensorsOf(Nothing())).ok());
  const at::NoGradGuard no_grad;
  for (const char* const device : {"cpu", "disk"}) {
    const auto net = InitEmptyWeights([] { return std::make_shared<Nothing>(); });
    const auto dispatched = LoadCheckpointAndDispatch(*net, folder.path(), {{"", device}});
    ASSERT_TRUE(dispatched.ok()) << dispatched.status();
    EXPECT_TRUE(net->weight.is_cpu()) << device;
    EXPECT_EQ(net->weight.sum().item<float>(), 0);
  }
}

TEST_F(Dispatch, LimitWithoutEnd_IsNoLimit) {
  const TextNet net = EmptyNet();
  DevicePlanOptions plan;
  plan.max_memory = {{"cpu", std::numeric_limits<double>::infinity()}};
  const auto map = PlanDevices(*net, "auto", plan);
  ASSERT_TRUE(map.ok()) << map.status();
  LoadCheckpointOptions options;
  options.dispatch.max_memory = plan.max_memory;
  const auto dispatched = Load(net, {{"", "disk"}}, options);
  ASSERT_TRUE(dispatched.ok()) << dispatched.status();
  EXPECT_TRUE(at::equal(Compute(net), expected_));
}

// D38: of two files in a folder, the one that cannot execute anything is used.
TEST_F(Dispatch, D38_SafetensorsBesideABinFile_Count) {
  const TestFolder folder;
  ASSERT_TRUE(SaveModelFiles(folder.path(), TensorsOf(*whole_)).ok());
  ASSERT_TRUE(WriteFileAtomically(folder.Path("pytorch_model.bin"), "not weights").ok());
  TextNet net = EmptyNet();
  const auto dispatched = LoadCheckpointAndDispatch(*net, folder.path(), {{"", "disk"}});
  ASSERT_TRUE(dispatched.ok()) << dispatched.status();
  EXPECT_TRUE(at::equal(Compute(net), expected_));
}

TEST_F(Dispatch, BadInput_IsNamed) {
  EXPECT_THAT(Error({{"layerz", "disk"}, {"", "cpu"}}),
              HasSubstr("\"layerz\", which is no module"));
  EXPECT_THAT(Error({{"layers", "cpu"}}), HasSubstr("no device for"));
  EXPECT_THAT(Error({{"", "99"}}), HasSubstr("device 99 does not exist"));
  EXPECT_THAT(Error({{"", "tape"}}), HasSubstr("\"tape\" is not recognized"));
  TextNet wider = InitEmptyWeights([] { return TextNet(kVocabulary, 2 * kWidth, kBlocks); });
  EXPECT_THAT(
      Text(LoadCheckpointAndDispatch(*wider, folder_.path(), {{"", "disk"}}).status()),
      AllOf(HasSubstr("mismatched: head ([50, 64] F32 in the file, [50, 128] Float here)")));
  const auto files = ListDirectory(folder_.path());
  ASSERT_TRUE(files.ok());
  const auto shard = std::find_if(files->begin(), files->end(), [](const std::string& name) {
    return name.starts_with("model-00002");
  });
  ASSERT_NE(shard, files->end());
  ASSERT_EQ(unlink(folder_.Path(*shard).c_str()), 0);
  EXPECT_THAT(Error({{"", "disk"}}), HasSubstr(*shard));
  TextNet empty = EmptyNet();
  EXPECT_THAT(Text(DispatchModel(*empty, {{"", "cpu"}}).status()),
              HasSubstr("head has no values: load a checkpoint"));
  TextNet net = Net();
  EXPECT_THAT(Text(DispatchModel(*net, {{"", "disk"}}).status()),
              HasSubstr("name an offload_folder"));
  EXPECT_THAT(Text(CheckDiskSpace(folder_.path(), uint64_t{1} << 60)),
              HasSubstr("left, and offloading"));
}

// A weight of 4 TiB, of whose file only the header takes space on the disk.
struct HugeNetImpl : torch::nn::Module {
  HugeNetImpl() {
    weight = register_parameter("weight", at::empty({kTebibyte}), /*requires_grad=*/false);
  }
  at::Tensor weight;
};
TORCH_MODULE(HugeNet);

TEST_F(Dispatch, MemoryThatTheHostRefuses_IsNamed) {
  const TestFolder folder;
  const std::string path = folder.Path("model.safetensors");
  WriteHugeFile(path, "weight");
  HugeNet empty = InitEmptyWeights([] { return HugeNet(); });
  // One element that is repeated: an offload writes all of the repetitions.
  HugeNet wide = InitEmptyWeights([] { return HugeNet(); });
  PlaceTensor(wide->weight, at::zeros({1}).expand({kTebibyte}));
  const AtMostOneMoreTebibyte scarce;
  for (const absl::Status& status : {LoadCheckpointAndDispatch(*empty, path, {}).status(),
                                     CpuOffload(*wide, c10::Device(c10::kCPU)).status()}) {
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(Text(status), AllOf(HasSubstr("tensor \"weight\" of the model: needs "
                                              "4398046511104 bytes"),
                                    HasSubstr("a smaller max_memory")));
  }
}

TEST_F(Dispatch, Plan_RefusesWhatCannotBe) {
  const TextNet net = EmptyNet();
  const auto error = [&](const std::string& mode, const DevicePlanOptions& options) {
    return Text(PlanDevices(*net, mode, options).status());
  };
  EXPECT_THAT(error("best", {}), HasSubstr("device map \"best\""));
  EXPECT_THAT(error("auto", {.no_split = {"Blok"}}), HasSubstr("class Blok"));
  EXPECT_THAT(error("auto", {.max_memory = {{"cpu", 1000}}, .no_split = {"muster::BlockImpl"}}),
              HasSubstr("Block layers.0 is not to be divided"));
  EXPECT_THAT(error("auto", {.max_memory = {{"55", 1000}}}), HasSubstr("device 55 does not exist"));
}

TEST_F(Dispatch, FileThatIsCutWhileItIsUsed_IsNamedAndNothingCrashes) {
  const TestFolder folder;
  ASSERT_TRUE(SaveModelFiles(folder.path(), TensorsOf(*whole_)).ok());
  TextNet net = EmptyNet();
  const auto dispatched =
      LoadCheckpointAndDispatch(*net, folder.path(), {{"", "disk"}}, Ring(70'000));
  ASSERT_TRUE(dispatched.ok()) << dispatched.status();
  EXPECT_TRUE(at::equal(Compute(net), expected_));
  dispatched->ring()->WaitUntilIdle();
  ASSERT_EQ(truncate(folder.Path("model.safetensors").c_str(), 100'000), 0);
  const absl::Status status = Guard([&] { Compute(net); });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("model.safetensors: tensor \""),
                                  HasSubstr("it was changed while it is used")));
}

TEST_F(Dispatch, Training_IsRefused) {
  const TextNet net = EmptyNet();
  const auto dispatched = Load(net, {{"", "disk"}});
  ASSERT_TRUE(dispatched.ok()) << dispatched.status();
  EXPECT_THAT(ErrorOf([&] { TextNet(net)->forward(Ids()); }),
              HasSubstr("'embed.weight', which is offloaded and requires a gradient"));
}

}  // namespace
}  // namespace muster
