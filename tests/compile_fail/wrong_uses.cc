// Wrong uses, and what the compiler says of them. wrong_uses_test.py compiles each use with the
// types before the first one. The first error of a use must hold the text after "Error:"; a use
// without one must compile.
#include "muster/muster.h"

struct Net : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) { return linear(x); }
  torch::nn::Linear linear{register_module("linear", torch::nn::Linear(2, 1))};
};

using Rows = muster::TensorDataset<torch::Tensor, torch::Tensor>;
inline Rows Data() { return Rows(torch::zeros({8, 2}), torch::zeros({8, 1})); }

// Holds a tensor that Muster cannot see.
class Opaque {
 public:
  explicit Opaque(torch::Tensor tensor) : tensor_(std::move(tensor)) {}
  const torch::Tensor& tensor() const { return tensor_; }

 private:
  torch::Tensor tensor_;
};

// Use: everything as it should be
absl::Status Train(muster::Accelerator& accelerator) {
  auto net = std::make_shared<Net>();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  torch::optim::StepLR step_lr(sgd, 10);
  auto [model, optimizer, loader, schedule] =
      accelerator.prepare(net, sgd, muster::batches(Data(), 4), step_lr);
  for (auto& [x, y] : loader) {
    accelerator.backward(torch::mse_loss(model(x), y));
    optimizer.step();
    schedule.step();
  }
  return absl::OkStatus();
}
int Run(int argc, char** argv) { return muster::run(argc, argv, Train); }

// Use: a module itself
// Error: prepare() cannot hold a module by value or reference: make it a std::shared_ptr
void Use(muster::Accelerator& accelerator) {
  Net net;
  auto model = accelerator.prepare(net);
}

// Use: a pointer to a module
// Error: prepare() cannot hold a module by a raw or unique pointer: make it a std::shared_ptr
void Use(muster::Accelerator& accelerator) {
  Net net;
  auto model = accelerator.prepare(&net);
}

// Use: a module in a unique_ptr
// Error: prepare() cannot hold a module by a raw or unique pointer: make it a std::shared_ptr
void Use(muster::Accelerator& accelerator) {
  auto net = std::make_unique<Net>();
  auto model = accelerator.prepare(net);
}

// Use: a data set where prepare_model() wants a model
// Error: prepare_model() takes a module holder, a std::shared_ptr
void Use(muster::Accelerator& accelerator) { auto model = accelerator.prepare_model(Data()); }

// Use: an optimizer in a unique_ptr
// Error: prepare() takes an optimizer by reference or std::shared_ptr: pass *optimizer
void Use(muster::Accelerator& accelerator) {
  auto net = std::make_shared<Net>();
  auto sgd = std::make_unique<torch::optim::SGD>(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
}

// Use: an optimizer without a name
// Error: prepare() borrows the optimizer: give it a name and keep it alive
void Use(muster::Accelerator& accelerator) {
  auto net = std::make_shared<Net>();
  auto [model, optimizer] = accelerator.prepare(net, torch::optim::SGD(net->parameters(), 0.1));
}

// Use: a const optimizer
// Error: prepare() got a const optimizer, which cannot step
void Use(muster::Accelerator& accelerator) {
  auto net = std::make_shared<Net>();
  const torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
}

// Use: a data loader of LibTorch's
// Error: prepare() cannot shard a data loader of LibTorch's: pass the data set instead
void Use(muster::Accelerator& accelerator) {
  auto data = torch::data::datasets::TensorDataset(torch::zeros({8, 2}));
  auto loader = torch::data::make_data_loader(std::move(data), 4);
  auto prepared = accelerator.prepare(*loader);
}

// Use: a data loader of LibTorch's in the pointer it comes in
// Error: prepare() cannot shard a data loader of LibTorch's: pass the data set instead
void Use(muster::Accelerator& accelerator) {
  auto data = torch::data::datasets::TensorDataset(torch::zeros({8, 2}));
  auto loader = torch::data::make_data_loader(std::move(data), 4);
  auto prepared = accelerator.prepare(loader);
}

// Use: a data set without a batch size
// Error: prepare() does not take a bare data set: wrap it as muster::batches(
void Use(muster::Accelerator& accelerator) { auto loader = accelerator.prepare(Data()); }

// Use: a data set where prepare_data_loader() wants batches
// Error: prepare_data_loader() takes what batches() gives
void Use(muster::Accelerator& accelerator) {
  auto loader = accelerator.prepare_data_loader(Data());
}

// Use: a tensor
// Error: prepare() does not take tensors: a tensor of data goes in as muster::batches(
void Use(muster::Accelerator& accelerator) {
  auto loader = accelerator.prepare(torch::zeros({8, 2}));
}

// Use: something prepare() has no use for
// Error: prepare() does not know this type: it takes models, optimizers,
void Use(muster::Accelerator& accelerator) { auto prepared = accelerator.prepare(0.5); }

// Use: batches() of something that is no data set
// Error: not a data set: it has neither get_batch(), get() nor operator[] with size()
void Use(muster::Accelerator& accelerator) {
  struct Files {
    std::string folder;
  };
  auto loader = accelerator.prepare(muster::batches(Files{"data"}, 32));
}

// Use: batches() of a shared_ptr to something that is no data set
// Error: not a data set: it has neither get_batch(), get() nor operator[] with size()
void Use(muster::Accelerator& accelerator) {
  struct Files {
    std::string folder;
  };
  auto loader = accelerator.prepare(muster::batches(std::make_shared<Files>(), 32));
}

// Use: samples whose tensors cannot be seen
// Error: cannot be seen through
void Use(muster::Accelerator& accelerator) {
  struct Samples {
    Opaque get(size_t) const { return Opaque(torch::zeros({2})); }
    size_t size() const { return 8; }
  };
  auto loader = accelerator.prepare(muster::batches(Samples(), 4));
}

// Use: a schedule in a unique_ptr
// Error: prepare() takes a schedule of LibTorch's by reference or std::shared_ptr: pass *schedule
void Use(muster::Accelerator& accelerator) {
  auto net = std::make_shared<Net>();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto step_lr = std::make_unique<torch::optim::StepLR>(sgd, 10);
  auto [optimizer, schedule] = accelerator.prepare(sgd, step_lr);
}

// Use: a schedule without a name
// Error: prepare() borrows a schedule of torch::optim's: give it a name and keep it alive
void Use(muster::Accelerator& accelerator) {
  auto net = std::make_shared<Net>();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [optimizer, schedule] = accelerator.prepare(sgd, torch::optim::StepLR(sgd, 10));
}

// Use: a number where prepare_scheduler() wants a schedule
// Error: prepare_scheduler() takes a muster schedule (muster::StepLR(10), ...)
void Use(muster::Accelerator& accelerator, muster::AcceleratedOptimizer optimizer) {
  double rate = 0.1;
  auto schedule = accelerator.prepare_scheduler(optimizer, rate);
}

// Use: a model called with other arguments than it takes
// Error: the model cannot be called with these arguments
void Use(muster::AcceleratedModel<std::shared_ptr<Net>> model) {
  auto y = model(torch::zeros({1, 2}), 3);
}

// Use: a call of a torch::nn::Module
// Error: a shared_ptr to torch::nn::Module itself cannot be called
void Use(muster::Accelerator& accelerator) {
  std::shared_ptr<torch::nn::Module> net = std::make_shared<Net>();
  auto model = accelerator.prepare(net);
  auto y = model(torch::zeros({1, 2}));
}

// Use: call() of a method that the model does not have
// Error: model.call() takes a member function of the model's class
struct Other : torch::nn::Module {
  torch::Tensor encode(torch::Tensor x) { return x; }
};
void Use(muster::AcceleratedModel<std::shared_ptr<Net>> model) {
  auto y = model.call(&Other::encode, torch::zeros({1, 2}));
}

// Use: a model whose output cannot be seen
// Error: the model returns a type whose tensors Muster cannot see
struct Hiding : torch::nn::Module {
  Opaque forward(torch::Tensor x) { return Opaque(x); }
};
void Use(muster::AcceleratedModel<std::shared_ptr<Hiding>> model) {
  auto y = model(torch::zeros({1, 2}));
}

// Use: gather() of something whose tensors cannot be seen
// Error: cannot be seen through
void Use(muster::Accelerator& accelerator) {
  auto all = accelerator.gather(Opaque(torch::zeros({2})));
}

// Use: reduce() of a structure with a number
// Error: of a structure it would leave a number as it is, so make that a tensor
struct Sums {
  torch::Tensor loss;
  int64_t count;
};
void Use(muster::Accelerator& accelerator) {
  auto all = accelerator.reduce(Sums{torch::zeros({}), 3});
}

// Use: pad_across_processes() of a list
// Error: no tensor to pad: pad_across_processes() leaves lists as they are
void Use(muster::Accelerator& accelerator) {
  auto padded = accelerator.pad_across_processes(std::vector<int>{1, 2});
}

// Use: gather_for_metrics() of a structure with a number
// Error: gather_for_metrics() would leave the number or text beside the tensors as it is
void Use(muster::Accelerator& accelerator) {
  auto all = accelerator.gather_for_metrics(std::pair{torch::zeros({2}), 3});
}

// Use: gather_for_metrics() of several values with MetricRows
// Error: gather_for_metrics() of several values takes no MetricRows
void Use(muster::Accelerator& accelerator) {
  auto all = accelerator.gather_for_metrics(torch::zeros({2}), torch::zeros({2}),
                                            muster::MetricRows::kPerProcess);
}

// Use: split_between_processes() of a list that cannot be split
// Error: split_between_processes() would give all of this list to every process
void Use(muster::Accelerator& accelerator) {
  auto part = accelerator.split_between_processes(std::set<int>{1, 2});
}

// Use: split_between_processes() of an array
// Error: split_between_processes() would give all of this std::array to every process
void Use(muster::Accelerator& accelerator) {
  auto part = accelerator.split_between_processes(std::array<int, 2>{1, 2});
}

// Use: split_between_processes() of a value of TorchScript
// Error: split_between_processes() would give all of this value of TorchScript to every process
void Use(muster::Accelerator& accelerator) {
  auto part = accelerator.split_between_processes(torch::IValue(torch::zeros({4})));
}

// Use: broadcast() without its result
// Error: broadcast() returns the result and leaves its argument as it is
void Use(muster::Accelerator& accelerator) {
  auto seed = torch::zeros({1});
  accelerator.broadcast(seed);
}

// Use: reduce() in a group without its result
// Error: reduce() returns the result and leaves its argument as it is
void Use(muster::Accelerator& accelerator) {
  auto loss = torch::zeros({1});
  accelerator.new_group({0, 1}).reduce(loss, "mean");
}

// Use: gather() without its result
// Error: ignoring return value
void Use(muster::Accelerator& accelerator) { accelerator.gather(torch::zeros({2})); }

// Use: run() of a function with other parameters
// Error: muster::run() calls train(accelerator) or train(accelerator, arguments)
absl::Status Train(muster::Accelerator accelerator);
int Run(int argc, char** argv) { return muster::run(argc, argv, Train); }

// Use: run() of a function that returns an exit code
// Error: the function given to muster::run() must return absl::Status or nothing
int Train(muster::Accelerator& accelerator);
int Run(int argc, char** argv) { return muster::run(argc, argv, Train); }
