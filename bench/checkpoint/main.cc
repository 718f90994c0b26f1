// What saving and loading a state costs on this disk: how long an asynchronous save makes training
// wait, against a synchronous one, and how much longer the pass after it takes, whose step waits
// for what is copied late; how long it takes to be on disk, against plain O_DIRECT writes of as
// many bytes; and a load with a cold cache against plain O_DIRECT reads. The plain transfers are
// this program's own and share no code with the saver. All of it in turns in one process; medians
// in one JSON line.
//
// --limit_mb L: what training loses while a save is written at L MB/s: as many passes as it takes
// to write it with a save at the first one, against as many without. --dip_passes N: the same over
// N passes; without a limit writers rest as the saver has them rest.
//
// --device cuda: the state is on a GPU, and so are the steps. Every time begins and ends with an
// idle device, except that of the steps around a save: there the host runs ahead of the device as
// in training, and `lost_s` is what the same steps take longer with a save among them, the wait for
// its copies included. The link between device and host is measured in the same run.
//
// --ranks N: what it costs N ranks of a host, threads of this process, to read a model's and an
// optimizer's file of so many bytes together, and to copy them into tensors: each rank all of them
// (apart), or each a share of the blocks into memory that all map (together).
#include <sys/stat.h>
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "base/file.h"
#include "bench/checkpoint/plain_disk.h"
#include "bench/load_average.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "muster/muster.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/thread_comm.h"

namespace {

using muster::bench::Blocks;
using muster::bench::Check;
using muster::bench::DropFromCache;
using muster::bench::kBlock;
using muster::bench::Median;
using muster::bench::PlainBlocks;
using muster::bench::PlainRead;
using muster::bench::PlainWrite;
using muster::bench::Seconds;

// Returns the CPU time of all threads of this process while `work` runs, which is what counts on a
// busy machine.
double CpuSeconds(const std::function<void()>& work) {
  const auto now = [] {
    timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
  };
  const double start = now();
  work();
  return now() - start;
}

// Returns when the device has done what it was given; on the CPU, at once.
void WaitFor(const torch::Device& device) {
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// The work of a step besides that of the state's own layers.
class Work {
 public:
  // Takes about this many milliseconds of the device in each step; 0: there is no such work.
  Work(const torch::Device& device, double milliseconds) {
    if (milliseconds <= 0) return;
    const int64_t width = device.is_cpu() ? 512 : 8192;
    factor_ = torch::rand({width, width}, torch::TensorOptions(device).dtype(
                                              device.is_cpu() ? torch::kFloat : torch::kBFloat16))
                  .div_(width);
    product_ = torch::empty_like(factor_);
    constexpr int kTried = 10;
    times_ = kTried;
    Run();
    WaitFor(device);
    const double took = Seconds([&] {
      Run();
      WaitFor(device);
    });
    times_ = std::max(1, static_cast<int>(milliseconds * 1e-3 / took * kTried + 0.5));
  }

  void Run() {
    const torch::NoGradGuard no_grad;
    for (int i = 0; i < times_; ++i) torch::mm_out(product_, factor_, factor_);
  }

 private:
  torch::Tensor factor_, product_;
  int times_ = 0;
};

// The rate of the link between a GPU and the host, in GB/s, and the cost of pinning.
struct Link {
  bool pins = false;
  double pin_s_per_gib = 0;
  double to_host_pinned = 0, to_host_pageable = 0, to_device_pinned = 0, to_device_pageable = 0;
};

Link MeasureLink(const torch::Device& device) {
  constexpr size_t kBytes = size_t{1} << 30;
  Link link;
  const torch::Tensor there =
      torch::zeros({static_cast<int64_t>(kBytes)}, torch::TensorOptions(device).dtype(torch::kU8));
  muster::AlignedMemory memory;
  Check(memory.Grow(kBytes));
  std::fill_n(memory.data(), kBytes, 'x');
  const torch::Tensor here =
      torch::from_blob(memory.data(), {static_cast<int64_t>(kBytes)}, torch::kU8);
  const auto rate = [&](const torch::Tensor& to, const torch::Tensor& from) {
    std::vector<double> rates;
    for (int i = 0; i < 3; ++i) {
      WaitFor(device);
      rates.push_back(kBytes / 1e9 / Seconds([&] {
                        torch::Tensor(to).copy_(from, /*non_blocking=*/true);
                        WaitFor(device);
                      }));
    }
    return Median(rates);
  };
  link.to_host_pageable = rate(here, there);
  link.to_device_pageable = rate(there, here);
  const muster::HostPinning* const cuda = muster::HostPinning::Cuda();
  if (cuda == nullptr) return link;
  const uint64_t before = muster::AlignedMemory::PinnedBytes();
  link.pin_s_per_gib = Seconds([&] { memory.Pin(*cuda); });
  link.pins = muster::AlignedMemory::PinnedBytes() > before;
  if (!link.pins) return link;
  link.to_host_pinned = rate(here, there);
  link.to_device_pinned = rate(there, here);
  return link;
}

// Returns the tensors of a file of about `bytes`, 16 MiB each.
muster::NamedTensors TensorsOf(double bytes) {
  muster::NamedTensors tensors;
  for (int i = 0; i < std::max(1, static_cast<int>(bytes / (16 << 20) + 0.5)); ++i) {
    tensors.emplace_back("layer" + std::to_string(i) + ".weight", torch::rand({2048, 2048}));
  }
  return tensors;
}

void ReadOnRanks(int ranks, double gib, int rounds, const std::string& dir) {
  const double bytes = gib * (1 << 30);
  const std::vector<std::string> names = {muster::ModelFileName(0), muster::OptimizerFileName(0)};
  muster::RunRanks(1, [&](muster::Comm& comm) {
    Check(muster::SaveCheckpoint(comm, dir, {}, [&](muster::StateWriter& writer) {
      absl::Status status = writer.WriteModel(names[0], TensorsOf(bytes / 3));
      muster::StateDict optimizer;
      for (const auto& [name, tensor] : TensorsOf(bytes * 2 / 3)) {
        optimizer.SetTensor(name, tensor);
      }
      status.Update(writer.Write(names[1], optimizer));
      return status;
    }));
  });
  const auto read = [&](bool together, double* cpu) {
    return Seconds([&] {
      *cpu = CpuSeconds([&] {
        muster::RunRanks(ranks, [&](muster::Comm& comm) {
          auto reader = muster::StateReader::Open(dir);
          Check(reader.status());
          if (together) Check(reader->ReadTogether(comm, names));
          torch::Tensor target = torch::zeros({2048, 2048});
          for (const std::string& name : names) {
            const auto state = reader->Read(name);
            Check(state.status());
            for (const auto& [unused, tensor] : state->tensors()) target.copy_(tensor);
          }
        });
      });
    });
  };
  for (const bool cold : {true, false}) {
    std::vector<double> wall[2], cpu[2];
    const size_t size = DropFromCache(dir);
    for (int round = 0; round < rounds; ++round) {
      for (const bool together : {false, true}) {
        if (cold) {
          (void)DropFromCache(dir);
        } else {
          for (const std::string& name : names) {
            Check(muster::ReadFile(muster::JoinPath(dir, name)).status());
          }
        }
        double used = 0;
        wall[together].push_back(read(together, &used));
        cpu[together].push_back(used);
      }
    }
    std::printf(
        "{\"bench\":\"checkpoint_read\",\"ranks\":%d,\"cold\":%s,\"bytes\":%zu,\"apart_s\":%.3f,"
        "\"together_s\":%.3f,\"apart_cpu_s\":%.3f,\"together_cpu_s\":%.3f,\"load\":%.2f}\n",
        ranks, cold ? "true" : "false", size, Median(wall[0]), Median(wall[1]), Median(cpu[0]),
        Median(cpu[1]), muster::bench::LoadAverage());
  }
  Check(muster::RemoveTree(dir));
}

// Measures the throughput that training loses while a save of `bytes` is written at `limit` bytes a
// second (0: without a limit), over `passes` passes (0: as long as the limit makes it take, and a
// tenth).
void MeasureDip(size_t bytes, int64_t limit, int passes, int rounds, const torch::Device& device,
                const std::function<void()>& pass, const std::function<absl::Status()>& save,
                const std::function<absl::Status()>& wait) {
  pass();
  WaitFor(device);
  const double one = Seconds([&] {
    pass();
    WaitFor(device);
  });
  if (passes == 0) {
    passes =
        static_cast<int>(1.1 * static_cast<double>(bytes) / static_cast<double>(limit) / one) + 1;
  }
  const auto run = [&](bool saves) {
    return Seconds([&] {
      if (saves) Check(save());
      for (int i = 0; i < passes; ++i) pass();
      WaitFor(device);
    });
  };
  std::vector<double> dips, left, plain;
  for (int round = 0; round < rounds; ++round) {
    double with_save = 0;
    for (const bool saves : {round % 2 == 0, round % 2 == 1}) {  // whatever drifts meanwhile
      const double took = run(saves);
      if (saves) left.push_back(Seconds([&] { Check(wait()); }));
      (saves ? with_save : plain.emplace_back()) = took;
    }
    dips.push_back(1 - plain.back() / with_save);
  }
  std::printf(
      "{\"bench\":\"checkpoint_dip\",\"bytes\":%zu,\"limit_bytes_s\":%lld,\"passes\":%d,"
      "\"plain_s\":%.2f,\"dip\":%.4f,\"least_dip\":%.4f,\"most_dip\":%.4f,\"left_to_write_s\":%.3f,"
      "\"load\":%.2f}\n",
      bytes, static_cast<long long>(limit), passes, Median(plain), Median(dips),
      *std::min_element(dips.begin(), dips.end()), *std::max_element(dips.begin(), dips.end()),
      Median(left), muster::bench::LoadAverage());
}

}  // namespace

int main(int argc, char** argv) {
  double gib = 1, step_ms = -1;
  int rounds = 5, ranks = 1, steps = 3;
  std::string device_name = "cpu";
  int64_t limit_mb = 0;
  int dip_passes = 0;
  std::string dir = "checkpoint-bench";
  CLI::App app("What saving and loading a state costs on this disk.");
  app.add_option("--gib", gib, "of state: parameters and two moments")->check(CLI::PositiveNumber);
  app.add_option("--rounds", rounds)->check(CLI::PositiveNumber);
  app.add_option("--dir", dir, "a new folder on the disk that is measured; removed at the end");
  app.add_option("--ranks", ranks, "above 1: only reading, by so many ranks")
      ->check(CLI::PositiveNumber);
  app.add_option("--limit_mb", limit_mb,
                 "above 0: only the dip, with writes limited to so many MB/s")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--dip_passes", dip_passes, "above 0: only the dip, over so many passes")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--device", device_name, "where the state is and steps run")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--step_ms", step_ms,
                 "a step computes for so long beside the layers of the state (default: 150 on a "
                 "GPU, 0 on the CPU)");
  app.add_option("--steps", steps, "around a save, for what training loses to it")
      ->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  if (step_ms < 0) step_ms = device_name == "cpu" ? 0 : 150;
  if (ranks > 1) {
    ReadOnRanks(ranks, gib, rounds, dir);
    return 0;
  }
  if (mkdir(dir.c_str(), 0700) != 0) {
    std::fprintf(stderr, "%s cannot be made: %s; --dir names a new folder\n", dir.c_str(),
                 std::strerror(errno));
    return 2;
  }
  const auto path = [&dir](const char* name) { return muster::JoinPath(dir, name); };

  // Layers of 16 MiB, as many as the parameters' third of the state has room for.
  const int64_t layers = std::max<int64_t>(1, static_cast<int64_t>(gib * 64 / 3 + 0.5));
  torch::nn::Sequential net;
  for (int64_t i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(2048, 2048).bias(false)));
  }
  muster::FusedAdamW adamw(net->parameters());
  muster::AcceleratorOptions options;
  options.cpu = device_name == "cpu";
  muster::Accelerator before(options);
  const torch::Device device = before.device();
  if (device.is_cpu() != options.cpu) {
    std::fprintf(stderr, "this process sees no GPU; measure with --device cpu\n");
    Check(muster::RemoveTree(dir));
    return 2;
  }
  options.checkpoint.asynchronous = true;
  options.checkpoint.max_bytes_per_second = limit_mb * 1'000'000;
  muster::Accelerator beside(options);
  auto [model, optimizer] = before.prepare(net, adamw);
  auto [same_model, same_optimizer] = beside.prepare(net, adamw);
  const torch::Tensor input = torch::ones({64, 2048}, device);
  before.backward(model(input.narrow(0, 0, 1)).mean());
  optimizer.step();
  optimizer.zero_grad();
  Work work(device, step_ms);
  const auto pass = [&, &same_model = same_model, &same_optimizer = same_optimizer] {
    work.Run();
    beside.backward(same_model(input).mean());
    same_optimizer.step();
    same_optimizer.zero_grad();
  };
  // Begins and ends with an idle device.
  const auto time = [&](const std::function<void()>& what) {
    WaitFor(device);
    return Seconds([&] {
      what();
      WaitFor(device);
    });
  };

  if (limit_mb > 0 || dip_passes > 0) {
    // The first save takes the memory.
    Check(beside.save_state(path("beside")));
    Check(beside.wait_for_checkpoint());
    MeasureDip(
        DropFromCache(path("beside")), limit_mb * 1'000'000, dip_passes, rounds, device, pass,
        [&] { return beside.save_state(path("beside")); },
        [&] { return beside.wait_for_checkpoint(); });
    Check(muster::RemoveTree(dir));
    return 0;
  }

  std::vector<double> plain_write, synchronous, stall, durable, plain_read, huge_write, huge_read,
      load, durable_ratio, load_ratio, stall_ratio, synchronous_cpu, stall_cpu, durable_cpu,
      load_cpu, plain_pass, pass_after_save, plain_steps, lost, lost_ratio;
  double first_stall = 0;
  size_t bytes = 0;
  const PlainBlocks small = Blocks(false), huge = Blocks(true);
  for (int round = 0; round <= rounds; ++round) {
    double sync_cpu = 0, copy_cpu = 0, all_cpu = 0, read_cpu = 0;
    // Every save goes to a new folder or file, as those of the peers do.
    for (const char* name : {"before", "beside", "plain"}) {
      if (muster::PathExists(path(name))) Check(muster::RemoveTree(path(name)));
    }
    WaitFor(device);
    const double sync_s =
        Seconds([&] { sync_cpu = CpuSeconds([&] { Check(before.save_state(path("before"))); }); });
    double stall_s = 0;
    const double durable_s = Seconds([&] {
      all_cpu = CpuSeconds([&] {
        stall_s = Seconds(
            [&] { copy_cpu = CpuSeconds([&] { Check(beside.save_state(path("beside"))); }); });
        Check(beside.wait_for_checkpoint());
      });
    });
    if (round == 0) pass();
    const double pass_s = time(pass);
    Check(beside.save_state(path("beside")));
    // Not measured by time(): a device that still copies is what the pass waits for.
    const double pass_after_s = Seconds([&] {
      pass();
      WaitFor(device);
    });
    Check(beside.wait_for_checkpoint());
    const auto run = [&](bool saves) {
      return time([&] {
        pass();
        if (saves) Check(beside.save_state(path("beside")));
        for (int i = 0; i < steps; ++i) pass();
      });
    };
    const bool first = round % 2 == 0;  // whatever drifts meanwhile
    double run_s[2];
    for (const bool saves : {first, !first}) {
      run_s[saves] = run(saves);
      if (saves) Check(beside.wait_for_checkpoint());
    }
    bytes = (DropFromCache(path("beside")) + kBlock - 1) / kBlock * kBlock;
    const double write_s = Seconds([&] { PlainWrite(path("plain"), small, bytes); });
    const double read_s = Seconds([&] { PlainRead(path("plain"), small, bytes); });
    Check(muster::RemoveTree(path("plain")));
    const double huge_write_s = Seconds([&] { PlainWrite(path("plain"), huge, bytes); });
    const double huge_read_s = Seconds([&] { PlainRead(path("plain"), huge, bytes); });
    (void)DropFromCache(path("beside"));
    const double load_s =
        time([&] { read_cpu = CpuSeconds([&] { Check(beside.load_state(path("beside"))); }); });
    // The first round takes the memory that later ones use again.
    if (round == 0) {
      first_stall = stall_s;
      continue;
    }
    synchronous.push_back(sync_s);
    stall.push_back(stall_s);
    durable.push_back(durable_s);
    plain_write.push_back(write_s);
    plain_read.push_back(read_s);
    huge_write.push_back(huge_write_s);
    huge_read.push_back(huge_read_s);
    load.push_back(load_s);
    stall_ratio.push_back(stall_s / sync_s);
    durable_ratio.push_back(write_s / durable_s);
    load_ratio.push_back(read_s / load_s);
    synchronous_cpu.push_back(sync_cpu);
    stall_cpu.push_back(copy_cpu);
    durable_cpu.push_back(all_cpu);
    load_cpu.push_back(read_cpu);
    plain_pass.push_back(pass_s);
    pass_after_save.push_back(pass_after_s);
    plain_steps.push_back(run_s[0]);
    lost.push_back(run_s[1] - run_s[0]);
    lost_ratio.push_back(lost.back() / sync_s);
  }
  // Read while the memory of the saves is there.
  const uint64_t pinned = muster::AlignedMemory::PinnedBytes();
  const Link link = device.is_cpu() ? Link() : MeasureLink(device);
  std::printf(
      "{\"bench\":\"checkpoint\",\"bytes\":%zu,\"synchronous_s\":%.3f,\"stall_s\":%.4f,"
      "\"first_stall_s\":%.4f,\"stall_of_synchronous\":%.4f,\"durable_s\":%.3f,"
      "\"plain_write_s\":%.3f,\"durable_of_plain\":%.3f,\"cold_load_s\":%.3f,\"plain_read_s\":%.3f,"
      "\"load_of_plain\":%.3f,\"plain_huge_write_s\":%.3f,\"plain_huge_read_s\":%.3f,\"synchronous_"
      "cpu_s\":%.3f,\"stall_cpu_s\":%.4f,"
      "\"durable_cpu_s\":%.3f,\"cold_load_cpu_s\":%.3f,\"pass_s\":%.4f,"
      "\"pass_after_save_s\":%.4f,\"steps\":%d,\"steps_s\":%.4f,\"lost_s\":%.4f,"
      "\"lost_of_synchronous\":%.4f,\"pinned_bytes\":%llu,\"pins\":%d,\"pin_s_per_gib\":%.3f,"
      "\"to_host_pinned_gbps\":%.2f,\"to_host_pageable_gbps\":%.2f,"
      "\"to_device_pinned_gbps\":%.2f,\"to_device_pageable_gbps\":%.2f,\"direct\":%d,"
      "\"load\":%.2f}\n",
      bytes, Median(synchronous), Median(stall), first_stall, Median(stall_ratio), Median(durable),
      Median(plain_write), Median(durable_ratio), Median(load), Median(plain_read),
      Median(load_ratio), Median(huge_write), Median(huge_read), Median(synchronous_cpu),
      Median(stall_cpu), Median(durable_cpu), Median(load_cpu), Median(plain_pass),
      Median(pass_after_save), steps + 1, Median(plain_steps), Median(lost), Median(lost_ratio),
      static_cast<unsigned long long>(pinned), static_cast<int>(link.pins), link.pin_s_per_gib,
      link.to_host_pinned, link.to_host_pageable, link.to_device_pinned, link.to_device_pageable,
      static_cast<int>(muster::bench::PlainIsDirect()), muster::bench::LoadAverage());
  Check(muster::RemoveTree(dir));
  return 0;
}
