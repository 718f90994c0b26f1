// Trains a convolutional net on MNIST, on one process or many: the loop is ordinary LibTorch,
// Muster makes it distributed.
//
//   muster launch --num_processes 2 --cpu -- mnist --data_root DIR --output_dir OUT
//   muster launch --num_processes 2 --cpu -- mnist --data_root DIR --output_dir OUT --resume
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "examples/mnist/idx.h"
#include "examples/mnist/net.h"
#include "muster/muster.h"

namespace {

struct Flags {
  std::string data_root;
  std::string output_dir = "mnist-run";
  int64_t epochs = 3;
  int64_t batch_size = 64;  // per process
  double lr = 2e-3;
  int64_t seed = 42;
  bool resume = false;
  bool no_shuffle = false;
  bool no_eval = false;
  bool check_weights = false;
  int64_t checkpoint_steps = 0;
  int64_t stop_after_steps = 0;
  int64_t train_samples = 0;
  std::string loss_file;
};

using Images = muster::TensorDataset<torch::Tensor, torch::Tensor>;

torch::Tensor ToTensor(IdxArray array) {
  return torch::from_blob(array.values.data(), array.sizes, torch::kUInt8).clone();
}

// Returns the images as normalised floats [N, 1, 28, 28] and labels [N] (int64) of one part of the
// data set.
absl::StatusOr<Images> Load(const Flags& flags, const std::string& part, int64_t limit = 0) {
  absl::StatusOr<IdxArray> pixels = ReadIdx(flags.data_root + "/" + part + "-images-idx3-ubyte", 3);
  if (!pixels.ok()) return pixels.status();
  absl::StatusOr<IdxArray> digits = ReadIdx(flags.data_root + "/" + part + "-labels-idx1-ubyte", 1);
  if (!digits.ok()) return digits.status();
  if (pixels->sizes[0] != digits->sizes[0]) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.data_root, ": ", part, " has ", pixels->sizes[0], " images but ",
                     digits->sizes[0], " labels; run tools/fetch_mnist again"));
  }
  torch::Tensor images = ToTensor(*std::move(pixels)), labels = ToTensor(*std::move(digits));
  if (limit > 0) {
    images = images.slice(0, 0, limit);
    labels = labels.slice(0, 0, limit);
  }
  images = images.to(torch::kFloat32).div_(255).sub_(0.1307).div_(0.3081).unsqueeze(1);
  return Images(images, labels.to(torch::kInt64));
}

absl::Status Train(muster::Accelerator& accelerator, const Flags& flags) {
  muster::set_seed(flags.seed);
  Net net;
  torch::optim::AdamW adamw(net->parameters(), torch::optim::AdamWOptions(flags.lr));
  absl::StatusOr<Images> train_data = Load(flags, "train", flags.train_samples);
  if (!train_data.ok()) return train_data.status();
  absl::StatusOr<Images> test_data = Load(flags, "t10k");
  if (!test_data.ok()) return test_data.status();
  const int64_t per_step =
      flags.batch_size * accelerator.num_processes() * accelerator.gradient_accumulation_steps();
  const int64_t total_steps =
      flags.epochs * ((static_cast<int64_t>(train_data->size()) + per_step - 1) / per_step);

  auto [model, optimizer, train_set, test_set, schedule] = accelerator.prepare(
      net, adamw, muster::batches(*train_data, flags.batch_size).shuffle(!flags.no_shuffle),
      muster::batches(*test_data, 500),
      muster::LinearWithWarmup(/*warmup=*/total_steps / 10, total_steps));

  if (flags.resume) {
    if (absl::Status s = accelerator.load_state_if_present(); !s.ok()) return s;
    if (!accelerator.last_checkpoint().empty()) {
      accelerator.print("resumed from %s at step %ld\n", accelerator.last_checkpoint().c_str(),
                        accelerator.global_step());
    }
  }
  std::ofstream losses;
  if (!flags.loss_file.empty() && accelerator.is_main_process()) losses.open(flags.loss_file);

  for (int64_t epoch : accelerator.epochs(flags.epochs)) {
    model->train();
    muster::Progress progress = accelerator.progress(train_set, absl::StrCat("epoch ", epoch));
    for (auto& [images, labels] : train_set) {
      auto scope = accelerator.accumulate();
      torch::Tensor loss = torch::nll_loss(model(images), labels);
      accelerator.backward(loss);
      if (accelerator.sync_gradients()) accelerator.clip_grad_norm_(model->parameters(), 1.0);
      optimizer.step();
      schedule.step();
      optimizer.zero_grad();

      progress.Advance();
      if (!flags.loss_file.empty()) {
        const double mean = accelerator.reduce(loss.detach(), "mean").item<double>();
        if (losses.is_open())
          losses << absl::StrFormat("%d %.9g\n", accelerator.global_step(), mean);
      }
      if (!accelerator.sync_gradients()) continue;
      const int64_t step = accelerator.global_step();
      if (flags.checkpoint_steps > 0 && step % flags.checkpoint_steps == 0) {
        if (absl::Status s = accelerator.save_state(); !s.ok()) return s;
      }
      if (step == flags.stop_after_steps) return absl::OkStatus();
      // All processes act at the same step, on SIGTERM or `muster trigger`.
      const bool stop = accelerator.should_stop();
      if (stop || accelerator.check_trigger("checkpoint")) {
        if (absl::Status s = accelerator.save_state(); !s.ok()) return s;
        accelerator.print("step %ld saved in %s%s\n", step, accelerator.last_checkpoint().c_str(),
                          stop ? "; stopping" : "");
      }
      if (stop) return absl::OkStatus();
    }

    progress.Close();

    if (!flags.no_eval) {
      model->eval();
      torch::NoGradGuard no_grad;
      int64_t correct = 0, seen = 0;
      for (auto& [images, labels] : test_set) {
        auto [guess, truth] = accelerator.gather_for_metrics(model(images).argmax(1), labels);
        correct += guess.eq(truth).sum().item<int64_t>();
        seen += truth.size(0);
      }
      accelerator.print("epoch %ld: test accuracy %.4f on %ld images\n", epoch,
                        static_cast<double>(correct) / static_cast<double>(seen), seen);
    }
    if (absl::Status s = accelerator.save_state(); !s.ok()) return s;
    accelerator.print("epoch %ld: step %ld saved in %s\n", epoch, accelerator.global_step(),
                      accelerator.last_checkpoint().c_str());
  }
  if (flags.check_weights) {
    for (const auto& parameter : model->named_parameters()) {
      const torch::Tensor all = accelerator.gather(parameter.value().detach().unsqueeze(0));
      for (int64_t i = 1; i < all.size(0); ++i) {
        if (!torch::equal(all[i], all[0])) {
          return absl::InternalError(absl::StrCat("process ", i, " has other ", parameter.key()));
        }
      }
    }
    accelerator.print("the weights of all %d processes are bit-equal\n",
                      accelerator.num_processes());
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Trains a convolutional net on MNIST with Muster.", "mnist");
  app.add_option("--data_root", flags.data_root,
                 "folder with the four IDX files (tools/fetch_mnist DIR)");
  app.add_option("--output_dir", flags.output_dir, "where checkpoints go")->capture_default_str();
  app.add_option("--epochs", flags.epochs, "passes over the training images")
      ->capture_default_str()
      ->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--batch_size", flags.batch_size, "images per process and micro-step")
      ->capture_default_str()
      ->check(CLI::Range(1, 1'000'000'000));
  app.add_option("--lr", flags.lr, "peak learning rate")->capture_default_str();
  app.add_option("--seed", flags.seed, "of weights and order")->capture_default_str();
  app.add_flag("--resume", flags.resume,
               "continue from the newest checkpoint in --output_dir, if there is one");
  app.add_flag("--no_shuffle", flags.no_shuffle, "read the images in file order");
  app.add_flag("--no_eval", flags.no_eval, "leave out the test images");
  app.add_flag("--check_weights", flags.check_weights,
               "at the end, compare the weights of all processes");
  app.add_option("--checkpoint_steps", flags.checkpoint_steps, "also save every N steps");
  app.add_option("--stop_after_steps", flags.stop_after_steps, "end the run after this step");
  app.add_option("--train_samples", flags.train_samples, "use only the first N training images");
  app.add_option("--loss_file", flags.loss_file,
                 "write step and mean loss of every micro-step here");
  try {
    app.parse(argc, argv);
    if (flags.data_root.empty()) throw CLI::RequiredError("--data_root");
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "mnist: %s (see --help)\n", error.what());
    return 2;
  }

  muster::AcceleratorOptions options;
  options.project.directory = flags.output_dir;
  options.data_loader.data_seed = flags.seed;
  return muster::run(argc, argv, options,
                     [&](muster::Accelerator& accelerator, const muster::Arguments&) {
                       return Train(accelerator, flags);
                     });
}
