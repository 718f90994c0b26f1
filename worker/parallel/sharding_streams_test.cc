// Sharded models on a device with streams, on the CPU: whether memory is used in an order that
// holds whatever the streams' speed, and what runs in parallel.
//
// The host runs everything at once, as queued, so results are those of a device that keeps the
// order. FakeStreams knows which order it would have to keep; the allocator reuses freed memory as
// LibTorch's caching one does for a device: at once, for the next allocation on the stream that it
// came from.
//
// The host runs everything at once, as queued, so results are those of a device that keeps the
// order. FakeStreams knows which order it would have to keep; the allocator hands freed memory on
// as LibTorch's caching one does for a device, at once, to the next one that asks on the stream
// that it came from.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/Parallel.h"
#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/record_function.h"
#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "c10/core/CPUAllocator.h"
#include "c10/core/Event.h"
#include "c10/core/StreamGuard.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/comm_stream.h"
#include "worker/collective/fake_streams.h"
#include "worker/collective/ordered_comm.h"
#include "worker/collective/test_error.h"
#include "worker/collective/thread_comm.h"
#include "worker/parallel/sharded_model.h"
#include "worker/parallel/test_net.h"
#include "worker/parallel/test_passes.h"
#include "worker/train/host_parts.h"
#include "worker/train/optimizer.h"

namespace muster {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Point = FakeStreams::Point;

constexpr int kRanks = 2;
constexpr int kBlocks = 5;
constexpr int64_t kWidth = 24;
// A size that no other tensor has: parameters or gradients of a block in one buffer.
constexpr int64_t kUnitBytes = 4 * 2 * (kWidth * kWidth + kWidth);

FakeStreams& Streams() { return FakeStreams::Install(c10::DeviceType::CPU); }

// What a rank does in its thread; nothing is recorded elsewhere.
struct Record {
  struct Collective {
    std::string kind;
    Point point;
    bool beside;  // an operator of the program was queued for which it need not wait
  };
  c10::StreamId program = 0;
  std::vector<Collective> collectives;  // on other streams
};
thread_local Record* record = nullptr;

// While it lives, this thread records to `to`, or not at all.
class Recording {
 public:
  explicit Recording(Record* to) : before_(std::exchange(record, to)) {}
  ~Recording() { record = before_; }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  Record* const before_;
};

class StreamMemory : public c10::Allocator {
 public:
  // Replaces LibTorch's allocator.
  static StreamMemory& Install() {
    static auto& memory = *[] {
      auto* const made = new StreamMemory;
      c10::SetCPUAllocator(made, /*priority=*/255);
      return made;
    }();
    return memory;
  }

  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &Delete, cpu};
    const c10::StreamId stream = Streams().Current().id();
    // Few sizes: the more memory is reused, the more errors are found.
    const size_t size = std::bit_ceil(std::max<size_t>(bytes, 64));
    MutexLock lock(&mu_);
    std::vector<void*>& free = free_[{stream, size}];
    void* data = nullptr;
    if (free.empty()) {
      data = std::aligned_alloc(64, size);
      blocks_[data] = {.stream = stream, .size = size};
      ++made_[{stream, size}];
    } else {
      data = free.back();
      free.pop_back();
    }
    return {data, data, &Delete, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Delete; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  // The current stream reads or writes allocated memory: all of it or a part.
  void Use(const void* data, const std::string& what, bool write) {
    if (data == nullptr || record == nullptr) return;
    const Point now = Streams().Operate();
    MutexLock lock(&mu_);
    const auto it = blocks_.find(const_cast<void*>(data));
    if (it == blocks_.end()) return;  // a file's memory, a constant
    Block& block = it->second;
    Compare(block.writes, what);
    if (write) Compare(block.reads, what);
    (write ? block.writes : block.reads)[now.stream] = {now.number, what};
  }

  // Memory of the host that copies on streams read and write.
  void Watch(void* data) {
    MutexLock lock(&mu_);
    blocks_.try_emplace(data, Block{.stream = 0, .size = 0});
  }
  // The host has waited for all uses of the memory, and frees it.
  void Forget(void* data) {
    MutexLock lock(&mu_);
    blocks_.erase(data);
  }

  std::set<std::string> TakeMistakes() {
    MutexLock lock(&mu_);
    return std::exchange(mistakes_, {});
  }
  // The number of allocated pieces for `bytes` of `stream`.
  size_t Given(c10::StreamId stream, int64_t bytes) {
    const Pool pool = {stream, std::bit_ceil(static_cast<size_t>(bytes))};
    MutexLock lock(&mu_);
    return static_cast<size_t>(made_[pool]) - free_[pool].size();
  }
  // The number of pieces for `bytes` that were newly made for `stream`, not reused.
  int Made(c10::StreamId stream, int64_t bytes) {
    MutexLock lock(&mu_);
    return made_[{stream, std::bit_ceil(static_cast<size_t>(bytes))}];
  }

 private:
  struct LastUse {
    uint64_t number;
    std::string what;
  };
  struct Block {
    c10::StreamId stream;
    size_t size;
    // Including uses by earlier owners.
    std::map<c10::StreamId, LastUse> reads = {}, writes = {};
  };
  using Pool = std::pair<c10::StreamId, size_t>;

  // `what` on the current stream must come after all of `uses`.
  void Compare(const std::map<c10::StreamId, LastUse>& uses, const std::string& what)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (const auto& [stream, use] : uses) {
      if (Streams().IsBefore({stream, use.number})) continue;
      mistakes_.insert(what + " may run before " + use.what + " of another stream has ended");
    }
  }

  static void Delete(void* data) {
    if (data == nullptr) return;
    StreamMemory& self = Install();
    MutexLock lock(&self.mu_);
    const Block& block = self.blocks_.at(data);
    self.free_[{block.stream, block.size}].push_back(data);
  }

  Mutex mu_;
  std::unordered_map<void*, Block> blocks_ ABSL_GUARDED_BY(mu_);
  std::map<Pool, std::vector<void*>> free_ ABSL_GUARDED_BY(mu_);
  std::map<Pool, int> made_ ABSL_GUARDED_BY(mu_);
  std::set<std::string> mistakes_ ABSL_GUARDED_BY(mu_);
};

// The memory that an operator takes. It holds no reference: the operator may allocate the memory.
struct Taken : at::ObserverContext {
  std::vector<const c10::StorageImpl*> read, written;
};

void AddStorages(const c10::IValue& value, std::vector<const c10::StorageImpl*>& storages) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.has_storage()) {
      storages.push_back(tensor.storage().unsafeGetStorageImpl());
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) AddStorages(element, storages);
  }
}

std::unique_ptr<at::ObserverContext> BeginOperator(const at::RecordFunction& function) {
  if (record == nullptr || !function.operator_name().has_value()) return nullptr;
  const auto handle = c10::Dispatcher::singleton().findSchema(*function.operator_name());
  // This operator only looks at the kinds of tensors.
  if (!handle.has_value() || handle->schema().name() == "aten::_has_compatible_shallow_copy_type") {
    return nullptr;
  }
  const std::vector<c10::Argument>& arguments = handle->schema().arguments();
  auto taken = std::make_unique<Taken>();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::AliasInfo* const alias = arguments[i].alias_info();
    // A view reads nothing.
    if (alias != nullptr && !alias->isWrite()) continue;
    AddStorages(function.inputs()[i], alias == nullptr ? taken->read : taken->written);
  }
  return taken;
}

void EndOperator(const at::RecordFunction& function, at::ObserverContext* context) {
  if (record == nullptr || context == nullptr) return;
  StreamMemory& memory = StreamMemory::Install();
  const auto& taken = *static_cast<const Taken*>(context);
  const auto handle = c10::Dispatcher::singleton().findSchema(*function.operator_name());
  for (const c10::StorageImpl* storage : taken.read) {
    memory.Use(storage->data(), function.name(), /*write=*/false);
  }
  std::vector<const c10::StorageImpl*> written = taken.written;
  const std::vector<c10::Argument>& returns = handle->schema().returns();
  for (size_t i = 0; i < function.outputs().size() && i < returns.size(); ++i) {
    if (returns[i].alias_info() == nullptr) AddStorages(function.outputs()[i], written);
  }
  for (const c10::StorageImpl* storage : written) {
    memory.Use(storage->data(), function.name(), /*write=*/true);
  }
  if (Streams().Current().id() != record->program) return;
  for (Record::Collective& collective : record->collectives) {
    if (!Streams().IsBefore(collective.point)) collective.beside = true;
  }
}

void InstallAll() {
  static const bool installed = [] {
    Streams();
    StreamMemory::Install();
    at::set_num_threads(1);
    at::addGlobalCallback(at::RecordFunctionCallback(BeginOperator, EndOperator)
                              .needsInputs(true)
                              .needsOutputs(true)
                              .scopes({at::RecordScope::FUNCTION}));
    return true;
  }();
  (void)installed;
}

// Collectives like those of NCCL: one operation on the current stream.
class DeviceComm : public BorrowedComm {
 public:
  using BorrowedComm::BorrowedComm;

  void AllReduce(at::Tensor& tensor, ReduceOp op) override {
    Alone([&] { BorrowedComm::AllReduce(tensor, op); });
    Queued("all-reduce", {}, tensor);
  }
  void AllGatherParts(at::Tensor& flat) override {
    Alone([&] { BorrowedComm::AllGatherParts(flat); });
    Queued("gather", {}, flat);
  }
  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp op) override {
    TORCH_CHECK(!fails, "the link is down");
    at::Tensor result;
    Alone([&] { result = BorrowedComm::ReduceScatter(flat, op); });
    Queued("reduction", flat, result);
    return result;
  }
  void Broadcast(at::Tensor& tensor, int root) override {
    Alone([&] { BorrowedComm::Broadcast(tensor, root); });
    Queued("broadcast", {}, tensor);
  }
  bool fails = false;

 private:
  // The threads of other ranks are not ordered with this one's streams.
  template <typename Fn>
  static void Alone(Fn collective) {
    const Recording none(nullptr);
    collective();
  }
  static void Queued(const char* kind, const at::Tensor& read, const at::Tensor& written) {
    StreamMemory& memory = StreamMemory::Install();
    if (read.defined()) memory.Use(read.storage().data(), kind, /*write=*/false);
    memory.Use(written.storage().data(), kind, /*write=*/true);
    if (record == nullptr || Streams().Current().id() == record->program) return;
    record->collectives.push_back({kind, Streams().Operate(), false});
  }
};

struct BlockImpl : torch::nn::Module {
  BlockImpl() {
    inner = register_module("inner", torch::nn::Linear(kWidth, kWidth));
    outer = register_module("outer", torch::nn::Linear(kWidth, kWidth));
  }
  at::Tensor Apply(const at::Tensor& x) { return x + outer(at::tanh(inner(x))); }
  torch::nn::Linear inner{nullptr}, outer{nullptr};
};
TORCH_MODULE(Block);

// Maps words to words, with one weight for both ends.
struct Net : torch::nn::Module {
  Net() {
    words = register_module("words", torch::nn::Embedding(11, kWidth));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < kBlocks; ++i) blocks->push_back(Block());
    uint64_t seed = 3;
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : parameters()) {
      parameter.copy_(Randn(parameter.sizes(), ++seed).div_(4));
    }
  }
  at::Tensor Apply(int i, const at::Tensor& x) { return blocks[i]->as<BlockImpl>()->Apply(x); }
  at::Tensor Loss(const at::Tensor& ids, const std::vector<int>& through) {
    at::Tensor x = words(ids);
    for (const int i : through) x = Apply(i, x);
    return at::cross_entropy_loss(at::linear(x, words->weight), (ids + 1).remainder(11));
  }
  torch::nn::Embedding words{nullptr};
  torch::nn::ModuleList blocks{nullptr};
};

const std::vector<int> kAll = {0, 1, 2, 3, 4};

at::Tensor IdsOf(int step, const Comm& comm) {
  return at::randint(11, {12},
                     at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step + 100)),
                     at::kLong)
      .chunk(comm.size())[comm.rank()];
}

// What a queue leaves out, to check that the test would notice.
enum class Missing { kNothing, kFollowing, kWaiting };

// As CommStream, without one of its two orders.
class Careless : public CommQueue {
 public:
  explicit Careless(Missing missing)
      : missing_(missing), stream_(Streams().getNewStream(Streams().device(), 0)) {}

  bool Suits(const c10::Device& /*device*/) const override { return true; }
  bool on_stream() const override { return true; }
  Ticket Submit(std::function<void()> body) override {
    const auto work = std::make_shared<Queued>();
    if (missing_ != Missing::kFollowing) {
      work->event.record(Streams().Current());
      work->event.block(stream_);
    }
    const c10::StreamGuard guard(stream_);
    in_body_ = true;
    body();
    in_body_ = false;
    work->event.record(stream_);
    last_ = work;
    return work;
  }
  void Wait(const Ticket& ticket) override {
    if (missing_ == Missing::kWaiting) return;
    static_cast<Queued&>(*ticket).event.block(Streams().Current());
  }
  bool WaitQuietly(const Ticket& ticket) override {
    Wait(ticket);
    return true;
  }
  void Drain() override {
    if (last_ != nullptr) Wait(last_);
  }
  bool IsCurrent() const override { return in_body_; }
  void Allocate(const std::function<void()>& allocate) override { Wait(Submit(allocate)); }

 private:
  struct Queued : Work {
    c10::Event event{c10::DeviceType::CPU};
  };

  const Missing missing_;
  const c10::Stream stream_;
  bool in_body_ = false;
  Ticket last_;
};

// Parts in the host's memory; uses of it are watched.
class WatchedParts : public HostParts {
 public:
  WatchedParts() : HostParts(c10::Device(c10::DeviceType::CPU), 1, Pinning()) {}
  ~WatchedParts() override {
    for (const uint64_t place : places_) StreamMemory::Install().Forget(DataOf(place));
  }

  uint64_t Reserve(uint64_t bytes) override {
    places_.push_back(HostParts::Reserve(bytes));
    return places_.back();
  }
  void ReadTo(uint64_t place, const at::Tensor& to) override {
    StreamMemory::Install().Watch(DataOf(place));
    HostParts::ReadTo(place, to);
  }
  void WriteFrom(uint64_t place, const at::Tensor& from) override {
    StreamMemory::Install().Watch(DataOf(place));
    HostParts::WriteFrom(place, from);
  }

 private:
  static const HostPinning* Pinning() {
    static const HostPinning& pinning =
        *new HostPinning{.pin = [](void*, size_t) { return true; }, .unpin = [](void*) {}};
    return &pinning;
  }

  std::vector<uint64_t> places_;
};

struct Setting {
  ShardingOptions options = {.strategy = ShardingStrategy::kFull};
  bool hybrid = false;    // four ranks, two copies
  bool in_pairs = false;  // four ranks, resharded in pairs
  Missing missing = Missing::kNothing;
  bool offloads = false;  // of parameters and gradients
};

using Values = std::map<std::string, at::Tensor>;

// A model on one rank, with its optimizer.
struct Trained {
  Trained(const Setting& setting, DeviceComm& all, DeviceComm* part, DeviceComm* copies,
          DeviceComm* node)
      : queue(MakeQueue(setting)),
        world(InOrder(&all)),
        shard(InOrder(part)),
        replicas(InOrder(copies)),
        reshard(InOrder(node)),
        model(*world, shard == nullptr ? *world : *shard, replicas.get(), &net, ParametersOf(net),
              {}, setting.options, true, queue, nullptr,
              setting.offloads ? std::make_unique<WatchedParts>() : nullptr, reshard.get()),
        sgd(model.shards(), {.lr = 0.1, .momentum = 0.9}) {}

  static std::shared_ptr<CommQueue> MakeQueue(const Setting& setting) {
    if (!setting.options.overlap) return nullptr;
    if (setting.missing != Missing::kNothing) return std::make_shared<Careless>(setting.missing);
    return std::make_shared<CommStream>(c10::Device(c10::DeviceType::CPU));
  }
  std::unique_ptr<Comm> InOrder(Comm* comm) const {
    if (comm == nullptr) return nullptr;
    auto borrowed = std::make_unique<BorrowedComm>(*comm);
    if (queue == nullptr) return borrowed;
    return MakeOrderedComm(std::move(borrowed), queue);
  }
  static std::vector<NamedParameter> ParametersOf(const torch::nn::Module& module) {
    std::vector<NamedParameter> parameters;
    for (const auto& item : module.named_parameters())
      parameters.push_back({item.key(), item.value()});
    return parameters;
  }

  at::Tensor Forward(const at::Tensor& ids, bool communicate = true,
                     const std::vector<int>& through = kAll, bool step_follows = true) {
    model.BeginForward(communicate, step_follows);
    const at::Tensor loss = net.Loss(ids, through);
    model.EndForward();
    return loss;
  }
  void Step() {
    model.Expire();
    sgd.Step();
    model.MarkChanged(model.shards());
    sgd.ZeroGrad();
  }
  void TrainOn(const at::Tensor& ids, const std::vector<int>& through = kAll) {
    Forward(ids, true, through).backward();
    Step();
  }
  Values Full() {
    Values values;
    for (auto& [name, tensor] : model.FullParameters([](const std::string&) { return true; }))
      values.emplace(name, tensor);
    return values;
  }

  Net net;
  const std::shared_ptr<CommQueue> queue;
  const std::unique_ptr<Comm> world, shard, replicas, reshard;
  ShardedModel model;
  FusedSGD sgd;
};

struct Here {
  Comm& comm;
  DeviceComm& device;
  Record& done;
};
using Program = std::function<void(Trained& trained, Here here)>;

// Runs it on all ranks; returns the values of rank 0 at the end.
Values Train(const Setting& setting, const Program& program) {
  InstallAll();
  const int ranks = setting.hybrid || setting.in_pairs ? 4 : kRanks;
  std::vector<std::unique_ptr<Comm>> pairs[2], across[2];
  for (int i = 0; i < 2; ++i) {
    pairs[i] = MakeThreadComms(2);
    across[i] = MakeThreadComms(2);
  }
  Values result;
  RunRanks(ranks, [&](Comm& comm) {
    const int r = comm.rank();
    DeviceComm all(comm), pair(*pairs[r / 2 % 2][r % 2]), others(*across[r % 2][r / 2 % 2]);
    Record done;
    done.program = Streams().Current().id();
    const Recording recording(&done);
    Trained trained(setting, all, setting.hybrid ? &pair : nullptr,
                    setting.hybrid ? &others : nullptr, setting.in_pairs ? &pair : nullptr);
    program(trained, {comm, all, done});
    Values values = trained.Full();
    if (r == 0) result = std::move(values);
  });
  return result;
}

std::set<std::string> Mistakes() { return StreamMemory::Install().TakeMistakes(); }

void ExpectEqual(const Values& values, const Values& want) {
  ASSERT_EQ(values.size(), want.size());
  for (const auto& [name, tensor] : want) EXPECT_TRUE(at::equal(values.at(name), tensor)) << name;
}

// Checks that bits are the same with streams and without, even with parts elsewhere, and that
// memory is used in order.
void Check(Setting setting, const Program& program) {
  setting.options.overlap = false;
  const Values without = Train(setting, program);
  EXPECT_THAT(Mistakes(), IsEmpty());
  for (const bool offloads : {false, true}) {
    if (offloads && setting.options.strategy != ShardingStrategy::kFull) continue;
    for (const bool overlap : {false, true}) {
      if (!offloads && !overlap) continue;
      SCOPED_TRACE(c10::str(offloads, " ", overlap));
      setting.offloads = offloads;
      setting.options.overlap = overlap;
      ExpectEqual(Train(setting, program), without);
      EXPECT_THAT(Mistakes(), IsEmpty());
    }
  }
}

// With accumulation, evaluation, reading and another order in between.
void TrainSixSteps(Trained& trained, const Here& here) {
  for (int step = 0; step < 6; ++step) {
    const std::vector<at::Tensor> parts = IdsOf(step, here.comm).chunk(step % 2 + 1);
    for (size_t i = 0; i < parts.size(); ++i) {
      // In step 3 each micro-step reduces.
      const bool last = i + 1 == parts.size();
      trained.Forward(parts[i], step == 3 || last, kAll, last).backward();
    }
    {
      const at::NoGradGuard no_grad;
      trained.Forward(parts[0]);
      if (step % 2 == 0) trained.model.Summon([] {});
      if (step == 3) trained.Full();
    }
    trained.Step();
  }
  for (const std::vector<int>& through :
       {std::vector<int>{0, 1, 3}, std::vector<int>{4, 3, 2, 1, 0}, std::vector<int>{1},
        std::vector<int>{0, 0, 1, 0}, kAll, kAll}) {
    trained.TrainOn(IdsOf(7, here.comm), through);
  }
}

TEST(ShardingStreams, EveryStrategy_HasTheBitsWithoutThemAndUsesMemoryInOrder) {
  std::vector<Setting> settings;
  for (const ShardingStrategy strategy :
       {ShardingStrategy::kOptimizer, ShardingStrategy::kGradients, ShardingStrategy::kFull}) {
    settings.push_back({.options = {.strategy = strategy}});
    settings.push_back({.options = {.strategy = strategy, .reduce_dtype = at::kBFloat16}});
    settings.push_back({.options = {.strategy = strategy, .parameter_dtype = at::kBFloat16}});
    settings.push_back({.options = {.strategy = strategy, .ignored_modules = "words|blocks\\.2"}});
  }
  settings.push_back(
      {.options = {.strategy = ShardingStrategy::kFull, .reshard_after_forward = false}});
  settings.push_back(
      {.options = {.strategy = ShardingStrategy::kFull, .group_size = 2}, .hybrid = true});
  settings.push_back({.options = {.strategy = ShardingStrategy::kFull, .reshard_group_size = 2},
                      .in_pairs = true});
  for (size_t i = 0; i < settings.size(); ++i) {
    SCOPED_TRACE(i);
    Check(settings[i], TrainSixSteps);
  }
}

TEST(ShardingStreams, PassesThatThrow_LeaveMemoryInOrder) {
  Check({}, [](Trained& trained, const Here& here) {
    for (int step = 0; step < 5; ++step) {
      const at::Tensor ids = IdsOf(step, here.comm);
      if (step >= 2) {
        // The gather of block 1 is under way.
        EXPECT_THAT(
            ErrorOfForward(trained.model, [&] { trained.net.Apply(0, trained.net.words(ids)); }),
            HasSubstr("of the program"));
      }
      if (step == 3) {
        // The reduction of a unit has begun.
        EXPECT_THAT(ErrorOfBackward(
                        trained.model, [&] { return trained.net.words(ids); },
                        [&](at::Tensor x) {
                          for (const int i : kAll) x = trained.net.Apply(i, x);
                          return x;
                        }),
                    HasSubstr("of the hook"));
        trained.sgd.ZeroGrad();
      }
      trained.TrainOn(ids);
    }
  });
}

TEST(ShardingStreams, ErrorOfAReduction_IsThrownByTheBackwardPass) {
  std::vector<std::string> errors(kRanks);
  Train({.options = {.strategy = ShardingStrategy::kFull, .overlap = true}},
        [&](Trained& trained, const Here& here) {
          trained.TrainOn(IdsOf(0, here.comm));
          here.device.fails = true;
          errors[here.comm.rank()] = ErrorOf([&] { trained.TrainOn(IdsOf(1, here.comm)); });
          here.device.fails = false;
        });
  for (const std::string& error : errors) {
    EXPECT_THAT(error, HasSubstr("the link is down"));
    EXPECT_THAT(error, HasSubstr("while reducing the gradients of unit 'blocks.4'"));
  }
  EXPECT_THAT(Mistakes(), IsEmpty());
}

// Updates right after the reduction, as on a GPU.
class Updates : public ShardUpdates {
 public:
  explicit Updates(FusedSGD& sgd) : sgd_(sgd) {}
  bool Begin(ShardedModel& /*model*/) override { return true; }
  void Touch() override {}
  void Update(std::vector<at::Tensor> shards) override {
    std::vector<size_t> which;
    for (size_t i = 0; i < sgd_.parameters().size(); ++i) {
      for (const at::Tensor& shard : shards) {
        if (sgd_.parameters()[i].is_same(shard)) which.push_back(i);
      }
    }
    const at::NoGradGuard no_grad;
    sgd_.StepOnly(which);
    for (const at::Tensor& shard : shards) shard.mutable_grad() = ShardUnit::UsedGradientMark();
  }
  void Await() override {}
  void End(ShardedModel& /*model*/, const std::vector<at::Tensor>& /*trained*/) override {}
  void Settle() override {}
  void CheckStepped(const ShardedModel& /*model*/, const char* /*what*/) const override {}

 private:
  FusedSGD& sgd_;
};

TEST(ShardingStreams, OptimizerInBackward_UsesMemoryInOrder) {
  for (const ShardingStrategy strategy : {ShardingStrategy::kGradients, ShardingStrategy::kFull}) {
    Check({.options = {.strategy = strategy}}, [](Trained& trained, const Here& here) {
      trained.model.UpdateInBackward(std::make_shared<Updates>(trained.sgd));
      for (int step = 0; step < 5; ++step) {
        trained.Forward(IdsOf(step, here.comm)).backward();
        trained.model.Expire();
        trained.sgd.ZeroGrad();
      }
    });
  }
}

// Makes `to` wait for what `from` has queued.
void Follow(const c10::Stream& to, const c10::Stream& from) {
  c10::Event event(c10::DeviceType::CPU);
  event.record(from);
  event.block(to);
}

TEST(ShardingStreams, ProgramWithStreamsOfItsOwn_UsesMemoryInOrder) {
  const Program program = [](Trained& trained, const Here& here) {
    const c10::Stream first = Streams().Current();
    const c10::Stream second = Streams().getNewStream(Streams().device(), 0);
    for (int step = 0; step < 5; ++step) {
      trained.model.BeginForward(true);
      const at::Tensor x = trained.net.words(IdsOf(step, here.comm));
      Follow(second, first);
      at::Tensor a;
      {
        const c10::StreamGuard guard(second);
        a = trained.net.Apply(0, x);
      }
      // Block 0 is freed meanwhile, and is used by the other stream once more.
      at::Tensor b = x;
      for (const int i : {1, 2}) b = trained.net.Apply(i, b);
      {
        const c10::StreamGuard guard(second);
        a = trained.net.Apply(2, a);
      }
      for (const int i : {3, 4}) b = trained.net.Apply(i, b);
      Follow(first, second);
      const at::Tensor y = at::linear(a + b, trained.net.words->weight);
      trained.model.EndForward();
      y.square().mean().backward();
      trained.Step();
      Follow(second, first);
    }
  };
  const Values without = Train({}, program);
  // Without a queue gathers are on the current stream, and no other stream waits for them.
  Mistakes();
  for (const bool offloads : {false, true}) {
    ExpectEqual(Train({.options = {.strategy = ShardingStrategy::kFull, .overlap = true},
                       .offloads = offloads},
                      program),
                without);
    EXPECT_THAT(Mistakes(), IsEmpty()) << offloads;
  }
}

TEST(ShardingStreams, OrderThatIsMissing_IsNoticed) {
  for (const Missing missing : {Missing::kFollowing, Missing::kWaiting}) {
    Setting setting;
    setting.options.overlap = true;
    setting.missing = missing;
    Train(setting, TrainSixSteps);
    EXPECT_THAT(Mistakes(), Contains(HasSubstr("gather")));
  }
}

TEST(ShardingStreams, FromTheSecondStep_GathersAndReductionsRunBesideOperators) {
  Train({.options = {.strategy = ShardingStrategy::kFull, .overlap = true}},
        [](Trained& trained, const Here& here) {
          for (int step = 0; step < 4; ++step) {
            here.done.collectives.clear();
            trained.TrainOn(IdsOf(step, here.comm));
            std::map<std::string, int> all, beside;
            for (const Record::Collective& collective : here.done.collectives) {
              ++all[collective.kind];
              if (collective.beside) ++beside[collective.kind];
            }
            EXPECT_EQ(all["gather"], 2 * kBlocks + 1);
            EXPECT_EQ(beside["gather"], step == 0 ? 0 : 2 * kBlocks) << "the first one has no time";
            EXPECT_EQ(all["reduction"], kBlocks + 1);
            // No operator comes after the last two.
            EXPECT_EQ(beside["reduction"], step == 0 ? 0 : kBlocks - 1);
          }
        });
}

// Freed memory is reused at once, so this holds however far the host is ahead.
TEST(ShardingStreams, MemoryOfUnits_IsThatOfThree) {
  Train({.options = {.strategy = ShardingStrategy::kFull, .overlap = true}},
        [](Trained& trained, const Here& here) {
          StreamMemory& memory = StreamMemory::Install();
          const c10::StreamId own = static_cast<CommStream&>(*trained.queue).stream().id();
          const int before = memory.Made(here.done.program, kUnitBytes);
          for (int step = 0; step < 6; ++step) trained.TrainOn(IdsOf(step, here.comm));
          EXPECT_GE(memory.Made(own, kUnitBytes), 2);
          EXPECT_LE(memory.Made(own, kUnitBytes), 3);
          EXPECT_EQ(memory.Made(here.done.program, kUnitBytes), before);
        });
}

TEST(ShardingStreams, Host_NeverWaitsForTheDevice) {
  for (const bool offloads : {false, true}) {
    Train({.options = {.strategy = ShardingStrategy::kFull, .overlap = true}, .offloads = offloads},
          [&](Trained& trained, const Here& here) {
            here.comm.Barrier();
            const int before = Streams().host_waits();
            TrainSixSteps(trained, here);
            EXPECT_EQ(Streams().host_waits(), before) << offloads;
            here.comm.Barrier();
          });
  }
}

TEST(ShardingStreams, PartsThatAreElsewhere_LeaveTheirMemory) {
  constexpr int64_t kPartBytes = kUnitBytes / kRanks;
  for (const bool overlap : {false, true}) {
    for (const bool offloads : {false, true}) {
      SCOPED_TRACE(c10::str(overlap, " ", offloads));
      Train({.options = {.strategy = ShardingStrategy::kFull, .overlap = overlap},
             .offloads = offloads},
            [&](Trained& trained, const Here& here) {
              StreamMemory& memory = StreamMemory::Install();
              const auto given = [&] {
                size_t pieces = memory.Given(here.done.program, kPartBytes);
                if (!overlap) return pieces;
                const auto& queue = static_cast<CommStream&>(*trained.queue);
                return pieces + memory.Given(queue.stream().id(), kPartBytes);
              };
              for (int step = 0; step < 4; ++step) trained.TrainOn(IdsOf(step, here.comm));
              // Momentum stays in place. The last page of gradients, except that of the words, is
              // freed when the next forward pass begins.
              EXPECT_EQ(given(), offloads ? kBlocks + 1 : 2 * kBlocks);
              trained.Forward(IdsOf(4, here.comm)).backward();
              EXPECT_EQ(given(), offloads ? kBlocks + 1 : 3 * kBlocks);
            });
    }
  }
}

}  // namespace
}  // namespace muster
