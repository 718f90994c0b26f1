// Programs that PyTorch trained (tests/testdata/training_programs), trained here under every
// strategy, on as many ranks, over sockets and in shared memory.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "base/test_folder.h"
#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "muster/optim.h"
#include "muster/test_ranks.h"
#include "tests/testdata/golden.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/optim/adagrad.h"
#include "torch/optim/adam.h"
#include "torch/optim/adamw.h"
#include "torch/optim/rmsprop.h"
#include "torch/optim/sgd.h"

namespace muster {
namespace {

using Json = nlohmann::json;
using Values = std::map<std::string, at::Tensor>;

constexpr int64_t kSamples = 24;

at::Tensor Numbers(at::IntArrayRef sizes, int64_t salt, at::ScalarType dtype) {
  const at::Tensor i = at::arange(c10::multiply_integers(sizes), at::kLong);
  const at::Tensor value = (i * i * 31 + i * 37 + salt * 101 + 17).remainder(97);
  return value.to(at::kDouble).div(97).sub(0.5).to(dtype).reshape(sizes);
}

int64_t SaltOf(const std::string& name) {
  int64_t sum = 0;
  for (size_t k = 0; k < name.size(); ++k) sum += static_cast<int64_t>(k + 1) * name[k];
  return sum % 1009;
}

at::ScalarType DtypeOf(const Json& program) {
  return program["dtype"] == "float64" ? at::kDouble : at::kFloat;
}

class Maker {
 public:
  explicit Maker(const Json& program) : dtype(DtypeOf(program)) {
    for (const Json& pair : program["model"]["tied"]) tied_[pair[0]] = pair[1];
    for (const std::string name : program["model"]["frozen"]) frozen_[name] = true;
  }

  at::Tensor Parameter(std::string name, at::IntArrayRef sizes) {
    if (const auto it = tied_.find(name); it != tied_.end()) name = it->second;
    at::Tensor& made = made_[name];
    if (made.defined()) return made;
    made = Numbers(sizes, SaltOf(name), dtype);
    if (sizes.size() == 2 && sizes[1] > 16) made = made * (8.0 / static_cast<double>(sizes[1]));
    if (name.size() > 5 && name.rfind(".gain") == name.size() - 5) made = made * 0.2 + 1;
    made.set_requires_grad(frozen_.count(name) == 0);
    return made;
  }

  const at::ScalarType dtype;

 private:
  std::map<std::string, std::string> tied_;
  std::map<std::string, bool> frozen_;
  Values made_;
};

struct Lin : torch::nn::Module {
  Lin(Maker& make, const std::string& name, int64_t in, int64_t out)
      : weight(Add("weight", make.Parameter(name + ".weight", {out, in}))),
        bias(Add("bias", make.Parameter(name + ".bias", {out}))) {}
  at::Tensor Add(const char* name, const at::Tensor& tensor) {
    return register_parameter(name, tensor, tensor.requires_grad());
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight, bias); }
  at::Tensor weight, bias;
};

struct Block : torch::nn::Module {
  // `rank` and `step` decide what a branch uses.
  virtual at::Tensor Apply(const at::Tensor& x, int64_t rank, int64_t step) = 0;
  std::shared_ptr<Lin> AddLin(const std::string& name, Maker& make, const std::string& owner,
                              int64_t in, int64_t out) {
    return register_module(name, std::make_shared<Lin>(make, owner + "." + name, in, out));
  }
  at::Tensor Add(Maker& make, const std::string& owner, const std::string& name,
                 at::IntArrayRef sizes) {
    const at::Tensor tensor = make.Parameter(owner + "." + name, sizes);
    return register_parameter(name, tensor, tensor.requires_grad());
  }
};

struct Mlp : Block {
  Mlp(Maker& make, const std::string& name, int64_t width, int64_t hidden)
      : a(AddLin("a", make, name, width, hidden)), b(AddLin("b", make, name, hidden, width)) {}
  at::Tensor Apply(const at::Tensor& x, int64_t, int64_t) override {
    return x + b->forward(at::tanh(a->forward(x)));
  }
  std::shared_ptr<Lin> a, b;
};

struct Norm : Block {
  Norm(Maker& make, const std::string& name, int64_t width)
      : gain(Add(make, name, "gain", {width})),
        shift(Add(make, name, "shift", {width})),
        a(AddLin("a", make, name, width, width)) {}
  at::Tensor Apply(const at::Tensor& x, int64_t, int64_t) override {
    return x + a->forward(at::layer_norm(x, {x.size(1)}, gain, shift, 1e-5));
  }
  at::Tensor gain, shift;
  std::shared_ptr<Lin> a;
};

struct Nested : Block {
  Nested(Maker& make, const std::string& name, int64_t width, const Json& hidden)
      : gain(Add(make, name, "gain", {width})),
        inner(register_module("inner", torch::nn::ModuleList())) {
    for (size_t i = 0; i < hidden.size(); ++i) {
      inner->push_back(std::make_shared<Mlp>(make, name + ".inner." + std::to_string(i), width,
                                             hidden[i].get<int64_t>()));
    }
  }
  at::Tensor Apply(const at::Tensor& in, int64_t rank, int64_t step) override {
    at::Tensor x = in * gain;
    for (const auto& each : *inner) x = each->as<Mlp>()->Apply(x, rank, step);
    return x * gain;
  }
  at::Tensor gain;
  torch::nn::ModuleList inner;
};

struct Bare : Block {
  Bare(Maker& make, const std::string& name, int64_t width)
      : w(Add(make, name, "w", {width, width})), gain(Add(make, name, "gain", {})) {}
  at::Tensor Apply(const at::Tensor& x, int64_t, int64_t) override {
    return at::tanh(at::matmul(x, w)) * gain;
  }
  at::Tensor w, gain;
};

struct Branch : Block {
  Branch(Maker& make, const std::string& name, int64_t width)
      : left(AddLin("left", make, name, width, width)),
        right(AddLin("right", make, name, width, width)) {}
  at::Tensor Apply(const at::Tensor& x, int64_t rank, int64_t step) override {
    return x + at::tanh(((rank + step) % 2 == 0 ? left : right)->forward(x));
  }
  std::shared_ptr<Lin> left, right;
};

struct Memory : Block {
  Memory(Maker& make, const std::string& name, int64_t width)
      : seen(register_buffer("seen", at::zeros({width}, make.dtype))),
        a(AddLin("a", make, name, width, width)) {}
  at::Tensor Apply(const at::Tensor& x, int64_t, int64_t) override {
    {
      const at::NoGradGuard no_grad;
      seen.mul_(0.9).add_(x.mean(0), 0.1);
    }
    return x + a->forward(x) + seen.clone();
  }
  at::Tensor seen;
  std::shared_ptr<Lin> a;
};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(const Json& program) {
    Maker make(program);
    const Json& model = program["model"];
    const int64_t width = model["width"];
    first = register_module("first", std::make_shared<Lin>(make, "first", model["in"], width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (size_t i = 0; i < model["blocks"].size(); ++i) {
      const Json& block = model["blocks"][i];
      blocks->push_back(MakeBlock(make, "blocks." + std::to_string(i), width, block));
    }
    head = register_module("head", std::make_shared<Lin>(make, "head", width, model["out"]));
  }

  static std::shared_ptr<Block> MakeBlock(Maker& make, const std::string& name, int64_t width,
                                          const Json& block) {
    const std::string kind = block["kind"];
    if (kind == "mlp") return std::make_shared<Mlp>(make, name, width, block["hidden"]);
    if (kind == "nested") return std::make_shared<Nested>(make, name, width, block["hidden"]);
    if (kind == "norm") return std::make_shared<Norm>(make, name, width);
    if (kind == "bare") return std::make_shared<Bare>(make, name, width);
    if (kind == "branch") return std::make_shared<Branch>(make, name, width);
    TORCH_CHECK(kind == "memory", "no block of kind ", kind);
    return std::make_shared<Memory>(make, name, width);
  }

  at::Tensor forward(const at::Tensor& in, const std::vector<size_t>& order, int64_t rank,
                     int64_t step) {
    at::Tensor x = first->forward(in);
    for (const size_t i : order) {
      x = std::dynamic_pointer_cast<Block>(blocks->ptr(i))->Apply(x, rank, step);
    }
    return head->forward(x);
  }

  std::shared_ptr<Lin> first, head;
  torch::nn::ModuleList blocks{nullptr};
};
TORCH_MODULE(Net);

// Parameters of one dimension or none have a group of their own.
struct Groups {
  Groups(const Json& optimizer, const torch::nn::Module& net) {
    std::set<const void*> seen;
    for (const at::Tensor& parameter : net.parameters()) {
      // Tied parameters are listed twice.
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      (optimizer["groups"] == "one" || parameter.dim() > 1 ? many : few).push_back(parameter);
    }
  }
  std::vector<at::Tensor> many, few;
};

using Handles = std::vector<std::shared_ptr<OptimizerHandle>>;

// `apart`: an optimizer for each group.
template <class Optimizer, class Options>
Handles Fused(const Groups& groups, const Options& options, bool apart) {
  Options few = options;
  few.lr *= 0.5;
  few.weight_decay = 0;
  std::vector<ParamGroup<Options>> all = {{groups.many, options}};
  if (!groups.few.empty()) all.push_back({groups.few, few});
  if (!apart) return {std::make_shared<Optimizer>(std::move(all))};
  Handles handles;
  for (const ParamGroup<Options>& group : all) {
    handles.push_back(std::make_shared<Optimizer>(std::vector<ParamGroup<Options>>{group}));
  }
  return handles;
}

Handles MakeFused(const Json& o, const torch::nn::Module& net, bool apart) {
  const Groups groups(o, net);
  const double lr = o["lr"], decay = o["weight_decay"];
  const std::string type = o["type"];
  if (type == "sgd") {
    return Fused<FusedSGD>(
        groups,
        SGDOptions{
            .lr = lr, .momentum = o["momentum"], .weight_decay = decay, .nesterov = o["nesterov"]},
        apart);
  }
  if (type == "adagrad") {
    return Fused<FusedAdagrad>(
        groups,
        AdagradOptions{.lr = lr, .lr_decay = o["lr_decay"], .weight_decay = decay, .eps = 1e-3},
        apart);
  }
  const std::array<double, 2> betas = {0.9, 0.99};
  if (type == "adam") {
    return Fused<FusedAdam>(
        groups, AdamOptions{.lr = lr, .betas = betas, .eps = 1e-3, .weight_decay = decay}, apart);
  }
  return Fused<FusedAdamW>(
      groups, AdamWOptions{.lr = lr, .betas = betas, .eps = 1e-3, .weight_decay = decay}, apart);
}

template <class Optimizer, class Options>
std::shared_ptr<torch::optim::Optimizer> OfLibTorch(const Groups& groups, const Options& options) {
  Options few = options;
  few.lr(options.lr() * 0.5).weight_decay(0);
  std::vector<torch::optim::OptimizerParamGroup> all;
  all.emplace_back(groups.many, std::make_unique<Options>(options));
  if (!groups.few.empty()) all.emplace_back(groups.few, std::make_unique<Options>(few));
  return std::make_shared<Optimizer>(std::move(all), options);
}

std::shared_ptr<torch::optim::Optimizer> MakeOfLibTorch(const Json& o,
                                                        const torch::nn::Module& net) {
  const Groups groups(o, net);
  const double lr = o["lr"], decay = o["weight_decay"];
  const std::string type = o["type"];
  if (type == "sgd") {
    return OfLibTorch<torch::optim::SGD>(groups, torch::optim::SGDOptions(lr)
                                                     .momentum(o["momentum"].get<double>())
                                                     .nesterov(o["nesterov"].get<bool>())
                                                     .weight_decay(decay));
  }
  if (type == "adagrad") {
    return OfLibTorch<torch::optim::Adagrad>(groups, torch::optim::AdagradOptions(lr)
                                                         .lr_decay(o["lr_decay"].get<double>())
                                                         .weight_decay(decay)
                                                         .eps(1e-3));
  }
  if (type == "rmsprop") {
    return OfLibTorch<torch::optim::RMSprop>(groups, torch::optim::RMSpropOptions(lr)
                                                         .momentum(o["momentum"].get<double>())
                                                         .centered(true)
                                                         .weight_decay(decay)
                                                         .eps(1e-3));
  }
  const std::tuple<double, double> betas = {0.9, 0.99};
  if (type == "adam") {
    return OfLibTorch<torch::optim::Adam>(
        groups, torch::optim::AdamOptions(lr).betas(betas).eps(1e-3).weight_decay(decay));
  }
  return OfLibTorch<torch::optim::AdamW>(
      groups, torch::optim::AdamWOptions(lr).betas(betas).eps(1e-3).weight_decay(decay));
}

at::Tensor SampleOf(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().to(at::kDouble).flatten();
  const at::Tensor taken = flat.slice(0, {}, {}, std::max<int64_t>(1, flat.numel() / kSamples));
  return at::cat({taken, flat.sum().reshape({1}), flat.square().sum().reshape({1})});
}

void Check(const absl::Status& status) { TORCH_CHECK(status.ok(), status.ToString()); }

struct Trained {
  Values values;
  std::vector<double> norms, losses;
};

// A part of the steps of a program.
struct Part {
  size_t begin = 0, end = std::numeric_limits<size_t>::max();
  std::string load = "", save = "";  // folders; empty: from the beginning; not saved
  // Each group of parameters has an optimizer of its own, and the program itself writes parameters,
  // with the values that they have.
  bool varied = false;
};

// Returns the values of process 0 at the end. If there are fewer processes than ranks of the
// program, each process stands for several ranks.
Trained Train(Accelerator& a, const Json& program, const Part& part = {}) {
  Net net(program);
  const auto frozen_or_not = net->named_parameters();
  const at::ScalarType dtype = DtypeOf(program);
  const int64_t stands_for = program["ranks"].get<int64_t>() / a.num_processes();
  // Before prepare(), because LibTorch's Adagrad makes its state from the parameters.
  const bool fused = program["optimizer"]["fused"] && program["optimizer"]["type"] != "rmsprop";
  Handles handles;
  std::shared_ptr<torch::optim::Optimizer> of_libtorch;
  if (fused) {
    handles = MakeFused(program["optimizer"], *net, part.varied);
  } else {
    of_libtorch = MakeOfLibTorch(program["optimizer"], *net);
  }
  AcceleratedModel<Net> model = a.prepare(net);
  std::vector<AcceleratedOptimizer> optimizers;
  for (const auto& handle : handles) optimizers.push_back(a.prepare(handle));
  if (!fused) optimizers.push_back(a.prepare(of_libtorch));
  std::vector<AcceleratedScheduler> schedules;
  if (!program["schedule"].is_null()) {
    const double total = program["schedule"]["total"];
    for (const AcceleratedOptimizer& optimizer : optimizers) {
      schedules.push_back(a.prepare_scheduler(optimizer, LambdaLR([total](int64_t step) {
                                                return std::max(
                                                    0.1, 1 - static_cast<double>(step) / total);
                                              })));
    }
  }
  if (!part.load.empty()) Check(a.load_state(part.load));
  const auto loss_of = [&](int64_t rank, int64_t step, int64_t forward) {
    const int64_t salt = step * 53 + forward * 71 + rank * 83;
    const Json& sizes = program["model"];
    const at::Tensor x = Numbers({4, sizes["in"].get<int64_t>()}, salt + 11, dtype) * 2;
    const at::Tensor y = Numbers({4, sizes["out"].get<int64_t>()}, salt + 29, dtype);
    const std::vector<size_t> order =
        program["steps"][static_cast<size_t>(step)]["orders"][static_cast<size_t>(forward)];
    return (model(x, order, rank, step) - y).square().mean();
  };
  Trained result;
  for (size_t s = 0; s < std::min(program["steps"].size(), part.end); ++s) {
    const Json& step = program["steps"][s];
    for (auto& item : frozen_or_not) {
      for (const std::string name : step["freeze"]) {
        if (name == item.key()) item.value().set_requires_grad(false);
      }
      for (const std::string name : step["thaw"]) {
        if (name == item.key()) item.value().set_requires_grad(true);
      }
    }
    if (s < part.begin) continue;
    {
      auto scope = a.accumulate();
      std::vector<at::Tensor> losses;
      double total = 0;
      for (size_t f = 0; f < step["orders"].size(); ++f) {
        at::Tensor loss;
        for (int64_t v = 0; v < stands_for; ++v) {
          const int64_t rank = a.process_index() * stands_for + v;
          const at::Tensor one = loss_of(rank, static_cast<int64_t>(s), static_cast<int64_t>(f));
          if (v == 0) total += one.item<double>();
          loss = v == 0 ? one : loss + one;
        }
        losses.push_back(loss / static_cast<double>(stands_for));
        if (step["backward"] == "turn") a.backward(losses.back());
      }
      if (step["backward"] == "sum") {
        at::Tensor sum = losses[0];
        for (size_t f = 1; f < losses.size(); ++f) sum = sum + losses[f];
        a.backward(sum);
      } else if (step["backward"] == "each") {
        for (const at::Tensor& loss : losses) a.backward(loss);
      }
      result.losses.push_back(total);
      const Json& clip = program["clip"];
      if (a.sync_gradients() && !clip.is_null()) {
        std::vector<at::Tensor> wanted;
        const std::string which = clip["which"];
        for (const auto& item : net->named_parameters()) {
          if (which == "all" || item.key().rfind(which, 0) == 0) wanted.push_back(item.value());
        }
        if (clip["kind"] == "norm") {
          const std::string type = clip["type"];
          const double norm_type =
              type == "inf" ? std::numeric_limits<double>::infinity() : std::stod(type);
          result.norms.push_back(a.clip_grad_norm_(wanted, clip["max"], norm_type).item<double>());
        } else {
          a.clip_grad_value_(wanted, clip["max"]);
        }
      }
      for (AcceleratedOptimizer& optimizer : optimizers) optimizer.step();
      for (AcceleratedScheduler& schedule : schedules) schedule.step();
      for (AcceleratedOptimizer& optimizer : optimizers) optimizer.zero_grad();
    }
    if (part.varied && s % 3 == 1) {
      a.summon_full_params(model, [&] {
        const at::NoGradGuard no_grad;
        for (at::Tensor& parameter : net->parameters()) parameter.mul_(2).mul_(0.5);
      });
    }
    if (step["eval"]) {
      const at::NoGradGuard no_grad;
      const int64_t salt = static_cast<int64_t>(s) * 53 + 7 * 71;
      const at::Tensor x =
          Numbers({4, program["model"]["in"].get<int64_t>()}, salt + 11, dtype) * 2;
      const std::vector<size_t> order = step["orders"][0];
      result.losses.push_back(
          model(x, order, 0, static_cast<int64_t>(s)).square().mean().item<double>());
    }
  }
  if (!part.save.empty()) Check(a.save_state(part.save));
  result.values = a.get_state_dict(model);
  return result;
}

struct Setting {
  std::string name;
  ShardingOptions sharding;
  bool shared_memory = false;
};

// Returns the settings under which `program` is trained. Small units are exchanged through slots,
// whether ranks share memory or not.
std::vector<Setting> SettingsFor(const Json& program, int ranks, const std::string& scratch) {
  const bool fused = program["optimizer"]["fused"] && program["optimizer"]["type"] != "rmsprop";
  bool branches = false, one_pass = true;
  for (const Json& block : program["model"]["blocks"]) branches |= block["kind"] == "branch";
  for (const Json& step : program["steps"]) one_pass &= step["orders"].size() == 1;
  std::vector<Setting> settings;
  for (const bool shared : {false, true}) {
    if (shared && (ranks == 1 || program["model"]["width"] < 48)) continue;
    const std::string where = shared ? " in shared memory" : "";
    const auto add = [&](const std::string& name, const ShardingOptions& options) {
      settings.push_back({name + where, options, shared});
    };
    // c10d::Reducer needs one forward pass for each backward pass.
    if (one_pass) add("no_shard", {});
    add("zero1", {.strategy = ShardingStrategy::kOptimizer});
    add("zero2", {.strategy = ShardingStrategy::kGradients});
    add("zero3", {.strategy = ShardingStrategy::kFull});
    add("zero3 not resharded",
        {.strategy = ShardingStrategy::kFull, .reshard_after_forward = false});
    add("zero2 overlapped", {.strategy = ShardingStrategy::kGradients, .overlap = true});
    add("zero3 overlapped", {.strategy = ShardingStrategy::kFull, .overlap = true});
    // All ranks use the same units.
    if (!branches) {
      add("zero3 of small units", {.strategy = ShardingStrategy::kFull, .min_unit_parameters = 4});
    }
    add("zero3 without the blocks 0 and 2",
        {.strategy = ShardingStrategy::kFull, .ignored_modules = "blocks\\.[02]"});
    if (ranks == 4) {
      add("hybrid", {.strategy = ShardingStrategy::kFull, .group_size = 2});
      add("hybrid zero2", {.strategy = ShardingStrategy::kGradients, .group_size = 2});
      add("hybrid overlapped",
          {.strategy = ShardingStrategy::kFull, .group_size = 2, .overlap = true});
      add("resharded in pairs", {.strategy = ShardingStrategy::kFull, .reshard_group_size = 2});
    }
    if (fused) {
      add("zero3 offloaded", {.strategy = ShardingStrategy::kFull,
                              .offload_optimizer = Offload::kDisk,
                              .offload_optimizer_path = scratch,
                              .offload_parameters = Offload::kDisk,
                              .offload_parameters_path = scratch});
    }
  }
  return settings;
}

// Returns ‖got - want‖ / ‖want - start‖ over all values.
double Distance(const Values& got, const Values& want, const Values& start) {
  double off = 0, moved = 0;
  for (const auto& [name, tensor] : want) {
    off += (got.at(name) - tensor).square().sum().item<double>();
    moved += (tensor - start.at(name)).square().sum().item<double>();
  }
  return std::sqrt(off / moved);
}

std::string ProgramsFolder() {
  const char* const folder = std::getenv("MUSTER_PROGRAMS");
  if (folder != nullptr && *folder != '\0') return folder;
  return testing_support::TestdataPath("training_programs");
}

// The programs, and the values they must end with.
class RecordedPrograms : public testing::Test {
 protected:
  void ForEach(const std::function<void(const Json& program, int number)>& fn) {
    std::ifstream file(ProgramsFolder() + "/cases.jsonl");
    int programs = 0;
    for (std::string line; std::getline(file, line); ++programs) {
      const Json program = Json::parse(line);
      const std::string id = program["id"];
      want_.clear();
      start_.clear();
      for (const auto& [name, tensor] : recorded_) {
        if (name.rfind(id + "/", 0) == 0) want_[name.substr(id.size() + 1)] = tensor;
      }
      const Net fresh(program);
      for (const auto& item : fresh->named_parameters()) {
        start_[item.key()] = SampleOf(item.value());
      }
      for (const auto& item : fresh->named_buffers()) start_[item.key()] = SampleOf(item.value());
      fn(program, programs);
    }
    EXPECT_GT(programs, 0);
  }

  // Returns the values of process 0 of `ranks`; nothing after an error, which is a failure of the
  // test.
  std::optional<Trained> Run(const Json& program, int ranks, const Setting& setting,
                             const Part& part = {}) {
    AcceleratorOptions options;
    options.sharding = setting.sharding;
    options.gradient_accumulation_steps = program["accumulation"].get<int64_t>();
    options.accumulation.sync_each_batch = program["sync_each_batch"];
    options.data_parallel.find_unused_parameters = true;
    Trained trained;
    try {
      const auto store = c10::make_intrusive<c10d::HashStore>();
      (setting.shared_memory ? RunShmRanks : RunGlooRanks)(
          ranks,
          [&](Comm& comm) {
            Accelerator a(CoreOn(comm, options, store));
            Trained mine = Train(a, program, part);
            if (a.is_main_process()) trained = std::move(mine);
          },
          {});
    } catch (const c10::Error& error) {
      ADD_FAILURE() << error.what_without_backtrace();
      return std::nullopt;
    }
    return trained;
  }

  void ExpectWanted(const Json& program, const Trained& trained) {
    const double tolerance = DtypeOf(program) == at::kDouble ? 1e-9 : 1e-5;
    Values got;
    for (const auto& [name, tensor] : want_) {
      ASSERT_EQ(trained.values.count(name), 1) << name;
      got[name] = SampleOf(trained.values.at(name));
    }
    EXPECT_LE(Distance(got, want_, start_), tolerance);
    const auto expect_near = [&](const std::vector<double>& got, const Json& want) {
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_NEAR(got[i], want[i].get<double>(), tolerance * (1 + want[i].get<double>()))
            << "number " << i;
      }
    };
    expect_near(trained.norms, program["norms"]);
    expect_near(trained.losses, program["losses"]);
  }

  const TestFolder scratch_;
  const Values recorded_ = LoadTensors(ProgramsFolder() + "/want.safetensors");
  Values want_, start_;  // of the program, samples by name
};

TEST_F(RecordedPrograms, UnderEveryStrategy_TrainAsInPyTorch) {
  ForEach([&](const Json& program, int) {
    const int ranks = program["ranks"];
    for (const Setting& setting : SettingsFor(program, ranks, scratch_.path())) {
      SCOPED_TRACE(program["id"].get<std::string>() + " " + setting.name);
      const std::optional<Trained> trained = Run(program, ranks, setting);
      if (trained.has_value()) ExpectWanted(program, *trained);
    }
  });
}

// Saved in the middle under one strategy, and continued under another one on another number of
// processes.
TEST_F(RecordedPrograms, ContinuedUnderAnotherStrategyAndSize_TrainAsInPyTorch) {
  ForEach([&](const Json& program, int number) {
    const int ranks = program["ranks"];
    const size_t window = program["accumulation"];
    const size_t middle = program["steps"].size() / window / 2 * window;
    if (middle == 0) return;
    bool remembers = false;  // state that depends on the ranks for which a process stands
    for (const Json& block : program["model"]["blocks"]) remembers |= block["kind"] == "memory";
    std::vector<int> sizes;
    for (int size = 1; size <= ranks; ++size) {
      if (ranks % size == 0 && (!remembers || size == ranks)) sizes.push_back(size);
    }
    for (int turn = 0; turn < 3; ++turn) {
      const auto setting_of = [&](int size, int which) {
        std::vector<Setting> settings = SettingsFor(program, size, scratch_.path());
        // c10d::Reducer needs one forward pass for each backward pass.
        if (size < ranks)
          std::erase_if(settings, [](const Setting& s) { return s.name == "no_shard"; });
        return settings[static_cast<size_t>(which) % settings.size()];
      };
      const int before = sizes[static_cast<size_t>(number + turn) % sizes.size()];
      const int after = sizes[static_cast<size_t>(number + 2 * turn + 1) % sizes.size()];
      const Setting first = setting_of(before, 5 * number + 3 * turn);
      const Setting second = setting_of(after, 7 * number + 4 * turn + 2);
      SCOPED_TRACE(c10::str(program["id"].get<std::string>(), " ", first.name, " on ", before, ", ",
                            second.name, " on ", after));
      const std::string folder =
          c10::str(scratch_.path(), "/", program["id"].get<std::string>(), "_", turn);
      const bool varied = turn != 1;
      const auto half = Run(program, before, first,
                            {.begin = 0, .end = middle, .save = folder, .varied = varied});
      if (!half.has_value()) continue;
      auto rest = Run(program, after, second, {.begin = middle, .load = folder, .varied = varied});
      if (!rest.has_value()) continue;
      rest->norms.insert(rest->norms.begin(), half->norms.begin(), half->norms.end());
      rest->losses.insert(rest->losses.begin(), half->losses.begin(), half->losses.end());
      ExpectWanted(program, *rest);
    }
  });
}

}  // namespace
}  // namespace muster
