#include "tests/chaos/crash_plans.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
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

// The calls of rank 0, from and to: the end of its first save, when there is no other checkpoint,
// and all of its second one; the end of the third, which removes the first. A test compares them
// with what an undisturbed run does.
constexpr std::pair<int, int> kCallsOfRank0[] = {{28, 71}, {105, 114}};

// The last passes that an undisturbed run surely has.
constexpr int kLastCall[] = {152, 14};
constexpr int kLastOfJournal = 12;
constexpr int kLastOfAgent[] = {20, 12};

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

// Kills a rank at its N-th call that changes something below the folder of checkpoints.
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

// Makes both ranks write parts of the model and of the optimizer's state.
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
  // Other failpoints, such as worker.checkpoint_publish, are right before one of the calls below.
  for (const char* const name :
       {"worker.checkpoint_begun", "worker.checkpoint_report", "worker.checkpoint_seal",
        "worker.checkpoint_sealed", "worker.checkpoint_registered"}) {
    plans.push_back(AtFailpoint(0, name, 2));
  }
  plans.push_back(AtFailpoint(0, "worker.checkpoint_deleted", 3));
  plans.push_back(AtFailpoint(0, "worker.checkpoint_block", 5, /*asynchronous=*/true));
  plans.push_back(AtFailpoint(0, "worker.checkpoint_sync", 5, /*asynchronous=*/true));
  plans.push_back(AtFailpoint(1, "worker.checkpoint_report", 2));
  plans.push_back(AtFailpoint(1, "worker.checkpoint_sync", 2, /*asynchronous=*/true));
  for (const auto& [from, to] : kCallsOfRank0) {
    for (int call = from; call <= to; ++call) plans.push_back(AtCall(0, call, false));
  }
  for (const int call : {30, 32, 50}) plans.push_back(AtCall(0, call, true));
  // A save of rank 1 makes four.
  for (int call = 4; call < 4 + 4; ++call) plans.push_back(AtCall(1, call, false));
  // With parts of the model, a save of rank 1 makes more calls.
  for (int call = 5; call < 5 + 3; ++call) {
    plans.push_back(AtCall(1, call, call % 2 == 0));
    Divide(plans.back());
  }
  for (const int pass : {8, kLastOfJournal}) {
    plans.push_back(OfCoordinator("journal.before_append", pass));
    plans.push_back(OfCoordinator("journal.before_fsync", pass));
    plans.push_back(OfCoordinator("journal.after_fsync", pass));
  }
  for (const int agent : {0, 1}) {
    // The agent of rank 1 has less to carry.
    for (const int pass : {agent == 0 ? kLastOfAgent[0] : 9, 12}) {
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
            draw(5, kLastOfJournal)));
        break;
      case 1: {
        const int agent = draw(0, 1);
        plans.push_back(
            OfAgent(agent, std::vector<std::string>{"agent.frame", "agent.received"}[draw(0, 1)],
                    draw(8, kLastOfAgent[agent])));
        break;
      }
      case 2:
        plans.push_back(AtFailpoint(draw(0, 1), "worker.checkpoint_report", draw(1, 3)));
        break;
      case 3:
      case 4:
        plans.push_back(AtCall(1, draw(1, kLastCall[1]), draw(0, 1) == 1));
        break;
      default:
        plans.push_back(AtCall(0, draw(1, kLastCall[0]), draw(0, 1) == 1));
    }
    plans.back().plan.name += absl::StrCat("_", i);
    if (draw(0, 1) == 1) Divide(plans.back());
  }
  return plans;
}

std::vector<std::string> CallsWithoutAPlan() {
  CrashPlan undisturbed = AtCall(0, /*call=*/0, /*asynchronous=*/false);
  const std::string log = TestPath(absl::StrCat("calls-", RandomHex()));
  undisturbed.plan.worker_env["MUSTER_CRASH_LOG"] = log;
  Cluster cluster(undisturbed.plan);
  std::vector<std::string> without = cluster.Run();
  const absl::StatusOr<std::string> text = ReadFile(log);
  if (!text.ok()) return {std::string(text.status().message())};
  // Whether calls count: from the beginning of the second save to the beginning of the third, and
  // from the removal of the first checkpoint to the beginning of the fourth.
  bool counts = false, began = false, removed = false;
  for (const absl::string_view line : absl::StrSplit(*text, '\n', absl::SkipEmpty())) {
    const auto makes = [&](absl::string_view name) {
      return absl::StrContains(line, " mkdir ") &&
             absl::StrContains(line, absl::StrCat("/", name, ".tmp-"));
    };
    if (makes("checkpoint_1")) counts = began = true;
    if (absl::StrContains(line, " rename ") && absl::EndsWith(line, "/checkpoint_0")) {
      counts = removed = true;
    }
    if (makes("checkpoint_2") || makes("checkpoint_3")) counts = false;
    int number = 0;
    if (!absl::SimpleAtoi(line.substr(0, line.find(' ')), &number)) {
      return {absl::StrCat("not a call: ", line)};
    }
    const bool planned = std::any_of(
        std::begin(kCallsOfRank0), std::end(kCallsOfRank0),
        [&](const auto& calls) { return calls.first <= number && number <= calls.second; });
    if (counts && !planned) without.emplace_back(line);
  }
  if (!began || !removed) without.push_back(absl::StrCat("no second save or removal:\n", *text));
  return without;
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
