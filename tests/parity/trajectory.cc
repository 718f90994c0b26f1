// Rebuilds the run that a golden `training` case describes and trains through the public API. The
// last line that rank 0 prints is one JSON object with the case's `out` fields.
//
//   muster launch --num_processes N --cpu -- trajectory --case FILE --data_root DIR
//   --output_dir DIR [--sharding NAME]
//
// FILE holds one case (an object with "in", or the "in" object itself); paths in it are relative to
// DIR of --data_root.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "muster/accelerator.h"
#include "muster/checkpoint.h"
#include "tests/parity/case_training.h"

namespace muster::parity {
namespace {

using Json = nlohmann::json;

struct Flags {
  std::string case_file, data_root = ".", output_dir = ".", sharding = "no_shard";
  bool gpu = false;
};

absl::Status Train(Accelerator& accelerator, const Json& in, const Flags& flags) {
  Trained trained = TrainCase(accelerator, in, flags.data_root);
  if (!accelerator.is_main_process()) return absl::OkStatus();
  const std::string file = std::filesystem::absolute(flags.output_dir + "/final.safetensors");
  if (absl::Status s = SaveTensors(file, trained.weights); !s.ok()) return s;
  trained.out["final_weights"] = file;
  std::printf("%s\n", trained.out.dump().c_str());
  return absl::OkStatus();
}

absl::StatusOr<Json> ReadCase(const std::string& file) {
  std::ifstream stream(file);
  if (!stream.good()) return absl::NotFoundError("--case " + file + ": cannot be read");
  Json json = Json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object())
    return absl::InvalidArgumentError("--case " + file + ": not a JSON object");
  return json.contains("in") ? json["in"] : json;
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Trains what a golden training case describes.");
  app.add_option("--case", flags.case_file, "JSON file with one case")->required();
  app.add_option("--data_root", flags.data_root, "folder that the case's paths start from");
  app.add_option("--output_dir", flags.output_dir, "where final.safetensors is written");
  app.add_option("--sharding", flags.sharding, "no_shard, zero1, zero2, zero3 or hybrid");
  app.add_flag("--gpu", flags.gpu, "on GPUs; default: on the CPU");
  CLI11_PARSE(app, argc, argv);
  const absl::StatusOr<Json> in = ReadCase(flags.case_file);
  if (!in.ok()) {
    std::fprintf(stderr, "trajectory: %s\n", in.status().ToString().c_str());
    return 2;
  }
  std::error_code ignored;
  std::filesystem::create_directories(flags.output_dir, ignored);

  AcceleratorOptions options = TrainingOptions(*in, flags.sharding);
  options.cpu = !flags.gpu;
  return run(argc, argv, options, [&](Accelerator& accelerator, const Arguments&) {
    return Train(accelerator, *in, flags);
  });
}

}  // namespace
}  // namespace muster::parity

int main(int argc, char** argv) { return muster::parity::Main(argc, argv); }
