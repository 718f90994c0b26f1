#include "tests/chaos/crash_plans.h"

#include <unistd.h>

#include <algorithm>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "tests/chaos/child.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/seal.h"

namespace muster::chaos {
namespace {

constexpr int kRounds = 3;
constexpr size_t kKept = 2;
// 96 samples in batches of 8 on two ranks.
constexpr int64_t kStepsPerRound = 6;

Plan Base(const std::string& name) {
  Plan plan;
  plan.name = absl::StrCat("crash.", name);
  plan.agents = plan.workers = 2;
  plan.trains = true;
  plan.rounds = kRounds;
  plan.lease = absl::Seconds(2);
  plan.timeout = absl::Seconds(240);
  plan.worker_env = {{"MUSTER_CHAOS_KEEP", absl::StrCat(kKept)}};
  return plan;
}

// A rank, at its N-th call that changes something below the folder of checkpoints.
CrashPlan AtCall(int rank, int call, bool asynchronous) {
  CrashPlan crash;
  crash.plan = Base(
      absl::StrCat("rank", rank, asynchronous ? "_beside_training" : "", "_before_call_", call));
  crash.once = TestPath(absl::StrCat("crashed-", RandomHex()));
  auto& env = crash.plan.worker_env;
  env["LD_PRELOAD"] = ProgramPath("tests/chaos/libcrash_at.so");
  env["MUSTER_CRASH_AT"] = absl::StrCat(call);
  env["MUSTER_CRASH_RANK"] = absl::StrCat(rank);
  env["MUSTER_CRASH_ONCE"] = crash.once;
  if (asynchronous) env["MUSTER_CHAOS_ASYNCHRONOUS"] = "1";
  return crash;
}

CrashPlan AtFailpoint(int rank, const std::string& failpoint, int pass, bool asynchronous = false) {
  CrashPlan crash;
  crash.plan = Base(absl::StrCat("rank", rank, "_", failpoint, "_", pass));
  crash.plan.worker_failpoints[rank] = {absl::StrCat(failpoint, "=kill@", pass)};
  if (asynchronous) crash.plan.worker_env["MUSTER_CHAOS_ASYNCHRONOUS"] = "1";
  return crash;
}

// Both ranks write parts of the model and of the optimizer's state.
void Divide(CrashPlan& crash) {
  crash.plan.name += "_divided";
  crash.plan.worker_env["MUSTER_CHAOS_DIVIDED"] = "1";
}

CrashPlan OfCoordinator(const std::string& failpoint, int pass) {
  CrashPlan crash;
  crash.plan = Base(absl::StrCat("coordinator_", failpoint, "_", pass));
  crash.plan.coordinator_failpoints = {absl::StrCat(failpoint, "=kill@", pass)};
  return crash;
}

CrashPlan OfAgent(int agent, const std::string& failpoint, int pass) {
  CrashPlan crash;
  crash.plan = Base(absl::StrCat("agent", agent, "_", failpoint, "_", pass));
  crash.plan.agent_failpoints[agent] = {absl::StrCat(failpoint, "=kill@", pass)};
  return crash;
}

std::vector<std::string> CheckFolder(const std::string& root) {
  std::vector<std::string> wrong;
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(root);
  if (!names.ok()) return {std::string(names.status().message())};
  int64_t newest = -1;
  for (const std::string& name : *names) {
    if (absl::StrContains(name, ".")) {
      wrong.push_back(absl::StrCat("left over: ", name));
      continue;
    }
    const std::string dir = JoinPath(root, name);
    const absl::StatusOr<Manifest> manifest = VerifyCheckpoint(dir, VerifyLevel::kContents);
    if (!manifest.ok()) {
      wrong.push_back(absl::StrCat("not whole: ", manifest.status().message()));
      continue;
    }
    newest = std::max(newest, manifest->info.step);
    const absl::StatusOr<std::vector<std::string>> files = ListDirectory(dir);
    if (!files.ok()) continue;
    for (const std::string& file : *files) {
      if (manifest->Find(file) == nullptr && file != kManifestName && file != kSealName) {
        wrong.push_back(absl::StrCat("left over: ", dir, "/", file));
      }
    }
    if (const auto seal = ReadSeal(dir); !seal.ok()) {
      wrong.push_back(absl::StrCat("without a seal: ", seal.status().message()));
    }
  }
  if (names->size() != kKept) {
    wrong.push_back(absl::StrCat(names->size(), " checkpoints, not ", kKept));
  }
  if (newest != kRounds * kStepsPerRound) {
    wrong.push_back(absl::StrCat("the newest is of step ", newest));
  }
  return wrong;
}

}  // namespace

std::vector<CrashPlan> CrashPlans() {
  std::vector<CrashPlan> plans;
  for (const char* const name :
       {"worker.checkpoint_staged", "worker.checkpoint_publish", "worker.checkpoint_begun",
        "worker.checkpoint_report", "worker.checkpoint_seal", "worker.checkpoint_sealed",
        "worker.checkpoint_noted", "worker.checkpoint_renamed", "worker.checkpoint_registered"}) {
    plans.push_back(AtFailpoint(0, name, 2));
  }
  plans.push_back(AtFailpoint(0, "worker.checkpoint_doomed", 1));
  plans.push_back(AtFailpoint(0, "worker.checkpoint_deleted", 3));
  plans.push_back(AtFailpoint(0, "worker.checkpoint_block", 5, /*asynchronous=*/true));
  plans.push_back(AtFailpoint(0, "worker.checkpoint_sync", 5, /*asynchronous=*/true));
  plans.push_back(AtFailpoint(1, "worker.checkpoint_report", 2));
  plans.push_back(AtFailpoint(1, "worker.checkpoint_sync", 2, /*asynchronous=*/true));
  // A save of rank 0 makes about thirty such calls, one of rank 1 about four.
  for (int call = 28; call < 28 + 20; ++call) plans.push_back(AtCall(0, call, false));
  for (int call = 30; call < 30 + 5; ++call) plans.push_back(AtCall(0, call, true));
  for (int call = 4; call < 4 + 4; ++call) plans.push_back(AtCall(1, call, false));
  // With parts of the model it makes more of them.
  for (int call = 5; call < 5 + 3; ++call) {
    plans.push_back(AtCall(1, call, call % 2 == 0));
    Divide(plans.back());
  }
  for (const int pass : {8, 10, 12}) {
    plans.push_back(OfCoordinator("journal.before_append", pass));
    plans.push_back(OfCoordinator("journal.before_fsync", pass));
    plans.push_back(OfCoordinator("journal.after_fsync", pass));
  }
  for (const int agent : {0, 1}) {
    // The agent of rank 1 has less to carry.
    for (const int pass : {agent == 0 ? 20 : 9, 12}) {
      plans.push_back(OfAgent(agent, "agent.frame", pass));
      plans.push_back(OfAgent(agent, "agent.received", pass));
    }
  }
  return plans;
}

std::vector<CrashPlan> DrawnCrashPlans(uint32_t seed, int count) {
  std::mt19937 random(seed);
  const auto draw = [&random](int from, int to) {
    return std::uniform_int_distribution<int>(from, to)(random);
  };
  std::vector<CrashPlan> plans;
  for (int i = 0; i < count; ++i) {
    switch (draw(0, 9)) {
      case 0:
        plans.push_back(OfCoordinator(
            std::vector<std::string>{"journal.before_append", "journal.after_append",
                                     "journal.before_fsync", "journal.after_fsync"}[draw(0, 3)],
            draw(5, 20)));
        break;
      case 1:
        plans.push_back(OfAgent(
            draw(0, 1), std::vector<std::string>{"agent.frame", "agent.received"}[draw(0, 1)],
            draw(8, 40)));
        break;
      case 2:
        plans.push_back(AtFailpoint(draw(0, 1), "worker.checkpoint_report", draw(1, 3)));
        break;
      case 3:
      case 4:
        plans.push_back(AtCall(1, draw(1, 14), draw(0, 1) == 1));
        break;
      default:
        plans.push_back(AtCall(0, draw(1, 140), draw(0, 1) == 1));
    }
    plans.back().plan.name += absl::StrCat("_", i);
    if (draw(0, 1) == 1) Divide(plans.back());
  }
  return plans;
}

std::vector<std::string> RunCrashPlan(const CrashPlan& plan, bool* reached, std::string* logs) {
  Cluster cluster(plan.plan);
  std::vector<std::string> wrong;
  *reached = plan.once.empty();
  for (std::string& what : cluster.Run()) {
    if (absl::StrContains(what, "was never")) {
      *reached = false;
    } else {
      wrong.push_back(std::move(what));
    }
  }
  if (!plan.once.empty()) {
    *reached = PathExists(plan.once);
    (void)unlink(plan.once.c_str());
  }
  for (std::string& what : CheckFolder(cluster.dir() + "/run/checkpoints")) {
    wrong.push_back(std::move(what));
  }
  const std::string text = cluster.Logs();
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (absl::StrContains(line, "passing over") || absl::StrContains(line, "LOST")) {
      wrong.push_back(absl::StrCat("a checkpoint did not load: ", line));
    }
  }
  if (!wrong.empty()) *logs = text;
  return wrong;
}

}  // namespace muster::chaos
