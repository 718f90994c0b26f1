// Trains with checkpoints in memory after every step and, in its first attempt, comes to a bad end:
//   memory_worker CASE STEPS DIE_AT DISK_EVERY
// Rank 0 prints "begins at STEP" and, in the end, "weights DIGITS". In case "wait" it prints
// "waits at STEP" at step DIE_AT, as soon as the save of that step is whole and, on several nodes,
// mirrored, and all ranks wait for their end. In case "newer_on_disk" the checkpoint in the folder
// `newer` of the project appears among those on the disk before the second attempt loads. In case
// "bad_hook" nothing ends, but a hook of rank 1 throws in the save of step DIE_AT, and every rank
// prints "refused at STEP: WHY" for each save that fails. In case "join" every rank waits for its
// last save inside of join_uneven_inputs(), and prints the same of that. In case "disk_error" the
// first asynchronous save to the disk fails; every rank waits for each and prints the same of it.
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

#include "ATen/Functions.h"
#include "base/held_memory.h"
#include "muster/accelerator.h"
#include "muster/utils.h"
#include "torch/nn/functional/dropout.h"
#include "torch/nn/modules/linear.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/memory_mirror.h"
#include "worker/checkpoint/memory_record.h"

namespace {

using muster::Accelerator;

const char* Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Turns a bit of a file in every piece of memory that the agent holds.
void DamageMemory() {
  const auto held = muster::TakeHeldMemory(Variable("MUSTER_MEMORY_SOCKET"));
  TORCH_CHECK(held.ok(), held.status().ToString());
  for (const muster::HeldMemory& piece : *held) {
    char byte = 0;
    TORCH_CHECK(pread(piece.fd.get(), &byte, 1, 4096 + 20) == 1);
    byte ^= 1;
    TORCH_CHECK(pwrite(piece.fd.get(), &byte, 1, 4096 + 20) == 1);
  }
  std::printf("damaged %zu pieces\n", held->size());
}

// Whether this worker has a part of the save of this step: its own or, on several nodes, the mirror
// of another one's.
bool HasPart(int64_t step) {
  const bool mirror = std::string(Variable("GROUP_WORLD_SIZE")) != "1";
  const auto held = muster::TakeHeldMemory(Variable("MUSTER_MEMORY_SOCKET"));
  TORCH_CHECK(held.ok(), held.status().ToString());
  for (const muster::HeldMemory& piece : *held) {
    if (piece.worker_id != Variable("MUSTER_WORKER_ID") ||
        (piece.slot >= muster::MemoryMirror::kFirstSlot) != mirror) {
      continue;
    }
    const auto memory = muster::AlignedMemory::OfFile(piece.fd.get());
    TORCH_CHECK(memory.ok(), memory.status().ToString());
    const auto record = muster::ReadMemoryRecord(absl::string_view(memory->data(), memory->size()));
    if (record.ok() && record->manifest.info.step == step) return true;
  }
  return false;
}

absl::Status WaitForTheEnd(Accelerator& a) {
  const auto all_have_it = [&] {
    const at::Tensor here = at::full({1}, HasPart(a.global_step()) ? 1 : 0, at::kInt);
    return a.gather(here).min().item<int>() == 1;
  };
  while (!all_have_it()) {
    // A save that begins while another one is being mirrored is not mirrored itself.
    if (absl::Status s = a.save_state(); !s.ok()) return s;
  }
  if (a.is_main_process()) std::printf("waits at %ld\n", static_cast<long>(a.global_step()));
  std::fflush(stdout);
  while (true) pause();
}

absl::Status Train(Accelerator& a, const std::string& name, int64_t steps, int64_t die_at) {
  const bool first = std::string(Variable("MUSTER_RESTART_COUNT")) == "0";
  const bool dies = first && a.process_index() == 1;
  if (name == "damage" && !first && a.process_index() == 0) DamageMemory();
  if (name == "newer_on_disk" && !first && a.process_index() == 0) {
    const std::string project = Variable("MUSTER_PROJECT_DIR");
    std::filesystem::create_directories(project + "/checkpoints");
    std::filesystem::rename(project + "/newer", project + "/checkpoints/checkpoint_3");
  }
  a.wait_for_everyone();
  muster::set_seed(a, 7, /*device_specific=*/true);
  torch::nn::Linear net(64, 64);
  muster::FusedAdamW adamw(net->parameters(), {.lr = 0.05});
  const at::Tensor rows = at::arange(64 * 48, at::kFloat).view({48, 64}).remainder(13).div(13);
  auto [model, optimizer, loader] =
      a.prepare(net, adamw, muster::batches(muster::TensorDataset(rows), 2).shuffle(true));
  const auto hook =
      a.register_save_state_pre_hook([&](std::vector<muster::NamedTensors>&, muster::StateWriter&) {
        if (dies && name == "in_save" && a.global_step() == die_at) raise(SIGKILL);
        TORCH_CHECK(name != "bad_hook" || a.process_index() != 1 || a.global_step() != die_at,
                    "the hook says so");
      });
  if (absl::Status s = a.load_state_if_present(); !s.ok()) return s;
  const bool waits = name == "wait" && a.global_step() == 0;
  if (a.is_main_process()) std::printf("begins at %ld\n", static_cast<long>(a.global_step()));
  std::fflush(stdout);  // the process may be killed
  for (int64_t epoch : a.epochs(1000)) {
    (void)epoch;
    for (auto& batch : loader) {
      auto scope = a.accumulate();
      const at::Tensor x = torch::nn::functional::dropout(batch.value());
      a.backward(model(x).pow(2).mean());
      if (dies && name == "in_step" && a.global_step() == die_at) raise(SIGKILL);
      optimizer.step();
      optimizer.zero_grad();
      if (absl::Status s = a.save_state(); !s.ok()) {
        if (name != "bad_hook") return s;
        std::printf("refused at %ld: %s\n", static_cast<long>(a.global_step()),
                    std::string(s.message()).c_str());
      }
      if (name == "disk_error") {
        if (absl::Status s = a.wait_for_checkpoint(); !s.ok()) {
          std::printf("refused at %ld: %s\n", static_cast<long>(a.global_step()),
                      std::string(s.message()).c_str());
        }
      }
      if (waits && a.global_step() == die_at) return WaitForTheEnd(a);
      const bool after_save = name == "after_save" || name == "damage" || name == "newer_on_disk";
      if (dies && after_save && a.global_step() == die_at) {
        raise(SIGKILL);
      }
      if (a.global_step() == steps) break;
    }
    if (a.global_step() == steps) break;
  }
  if (name == "join") {
    auto join = a.join_uneven_inputs();
    std::printf("refused at %ld: %s\n", static_cast<long>(a.global_step()),
                std::string(a.wait_for_checkpoint().message()).c_str());
  }
  if (a.is_main_process()) {
    const at::Tensor weights = net->weight.detach().contiguous();
    uint64_t digest = 1469598103934665603u;
    for (size_t i = 0; i < weights.nbytes(); ++i) {
      digest = (digest ^ static_cast<const unsigned char*>(weights.data_ptr())[i]) * 1099511628211u;
    }
    std::printf("weights %016lx\n", static_cast<unsigned long>(digest));
  }
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  muster::AcceleratorOptions options;
  options.cpu = true;
  options.checkpoint.memory = true;
  options.checkpoint.keep = 2;
  options.checkpoint.disk_every = std::atoi(argv[4]);
  options.checkpoint.asynchronous = std::string(argv[1]) == "disk_error";
  return muster::run(argc, argv, options, [&](Accelerator& a) {
    return Train(a, argv[1], std::atoi(argv[2]), std::atoi(argv[3]));
  });
}
