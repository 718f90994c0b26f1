// Every kind of operation with random fields, against rules that must hold whatever comes in.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/core.h"
#include "coordinator/errors.h"
#include "proto/muster/v1/journal.pb.h"
#include "proto/random_message.h"

namespace muster::coordinator {
namespace {

const absl::Time kStart = absl::FromUnixSeconds(1'700'000'000);

class Fuzzer : public RandomMessage {
 public:
  using RandomMessage::RandomMessage;

  v1::Op Op() {
    v1::Op op;
    // Makes joins and arrivals often enough to get anywhere.
    FillKind(&op, Draw(3) != 0 ? "" : Draw(2) == 0 ? "join" : "arrive");
    if (op.has_join() && Draw(20) != 0) {
      v1::JoinRequest* join = op.mutable_join();
      const bool elastic = join->fence().job_id() == "j";
      join->clear_spec();
      join->mutable_spec()->set_min_workers(elastic ? 1 : 3);
      join->mutable_spec()->set_max_workers(3);
      *join->mutable_spec()->mutable_join_timeout() = ToProto(absl::Seconds(30));
      join->mutable_spec()->set_end_generation_on_failure(!elastic);
      join->set_preferred_rank(static_cast<int>(Draw(4)) - 1);
    }
    return op;
  }

  uint64_t generation_ = 0;  // the newest announced one

 private:
  bool Never(const std::string& name) const override { return name == "op_id"; }
  bool Always(const std::string& name) const override {
    return name == "fence" || name == "job_id" || name == "worker_id" || name == "barrier_id" ||
           name == "incarnation" || name == "generation";
  }
  std::string Text(const std::string& name) override {
    if (Draw(50) == 0) return std::string(Draw(3000), 'x');
    if (name == "job_id") return Draw(40) == 0 ? "" : Draw(3) == 0 ? "k" : "j";
    if (name == "worker_id") return Draw(8) == 0 ? "" : absl::StrCat("w", Draw(4));
    if (name == "barrier_id") return Draw(20) == 0 ? "" : Draw(2) == 0 ? "b" : "c";
    if (name == "host") return absl::StrCat("h", Draw(3));
    if (name == "key" || name == "keys")
      return Draw(3) == 0 ? absl::StrCat("gen/", generation_, "/x") : absl::StrCat("k", Draw(4));
    return Draw(3) == 0 ? "" : absl::StrCat(Draw(1000));
  }
  int64_t Number(const std::string& name) override {
    if (Draw(60) == 0) {
      const int64_t odd[] = {-1, INT64_MAX, INT64_MIN, INT32_MAX, INT32_MIN, 1 << 20, 4096};
      return odd[Draw(7)];
    }
    if (name == "term_seen") return static_cast<int64_t>(Draw(2));
    if (name == "generation")
      return static_cast<int64_t>(Draw(6) == 0 ? Draw(generation_ + 2) : generation_);
    if (name == "incarnation" || name == "incarnations")
      return 100 + static_cast<int64_t>(Draw(12) == 0 ? Draw(6) : incarnation_ + Draw(2));
    if (name == "seconds") return static_cast<int64_t>(Draw(8));
    if (name == "nanos") return static_cast<int64_t>(Draw(1'000'000'000));
    if (name == "request_id") return static_cast<int64_t>(Draw(2) == 0 ? 0 : next_request_++ / 2);
    if (Draw(200) == 0) ++incarnation_;
    return static_cast<int64_t>(Draw(4));
  }

  uint64_t incarnation_ = 0;
  uint64_t next_request_ = 2;
};

// Returns what a snapshot says, without an order and without what a restart may forget.
std::multiset<std::string> Meaning(const Core& core, bool with_hosts = false) {
  v1::CoordinatorSnapshot snapshot;
  EXPECT_TRUE(snapshot.ParseFromString(core.Snapshot()));
  std::multiset<std::string> changes;
  for (v1::JournalChange& change : *snapshot.mutable_changes()) {
    if (!with_hosts && (change.has_host_struck() || change.has_host_quarantined()))
      continue;  // they run out
    if (change.has_generation_sealed()) {
      // The agent that speaks for a rank is learned again.
      for (v1::SeatRecord& seat : *change.mutable_generation_sealed()->mutable_seats())
        seat.clear_node();
    }
    changes.insert(change.DebugString());
  }
  return changes;
}

// Takes a snapshot in small parts, as the journal's other thread makes it: from a second core that
// knows the last such snapshot and the records after it. `parts` becomes the snapshot.
void SnapshotByReplica(const CoreOptions& options, const Core& core,
                       const std::vector<std::string>& journal, size_t* replayed,
                       std::vector<std::string>* parts) {
  Core replica(options);
  for (const std::string& part : *parts) ASSERT_TRUE(replica.Restore(part).ok());
  for (; *replayed < journal.size(); ++*replayed)
    ASSERT_TRUE(replica.Replay(journal[*replayed]).ok());
  ASSERT_TRUE(replica.RestoreHosts(core.SnapshotHosts()).ok());
  ASSERT_EQ(Meaning(core, true), Meaning(replica, true));
  parts->clear();
  ASSERT_TRUE(replica
                  .WriteSnapshot(500,
                                 [&](std::string part) {
                                   parts->push_back(std::move(part));
                                   return absl::OkStatus();
                                 })
                  .ok());
  Core restored(options);
  for (const std::string& part : *parts) ASSERT_TRUE(restored.Restore(part).ok());
  ASSERT_EQ(Meaning(core, true), Meaning(restored, true));
}

class CoreFuzzTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(CoreFuzzTest, AnyOperations_RulesHold) {
  CoreOptions options;
  options.cluster_id = "c";
  options.kept_answers = 1 << 20;
  options.kept_barrier_results = 1 << 20;
  options.strikes_to_quarantine = static_cast<int>(GetParam() % 3);
  options.hubs = {.direct_agents = 1, .agents_per_hub = static_cast<int>(GetParam() % 3)};
  auto core = std::make_unique<Core>(options);
  Fuzzer fuzz(GetParam());
  absl::Time now = kStart;
  Output out;
  CallId next_call = 1;
  std::set<CallId> open;  // not answered yet
  std::vector<std::string> journal;
  uint64_t last_revision = 0;
  std::map<std::string, uint64_t> generations;
  std::set<int> kinds_done;
  std::vector<std::string> parts;  // of the last snapshot
  size_t replayed = 0;             // records that it stands for

  const auto absorb = [&] {
    for (const Reply& reply : out.replies) {
      ASSERT_EQ(open.erase(reply.call), 1u) << "call " << reply.call << " was answered twice";
      ASSERT_LE(reply.durable_revision, core->last_record_revision());
      const v1::OpResult result = reply.answer->Parse();
      ASSERT_NE(result.has_error(), result.kind_case() != v1::OpResult::KIND_NOT_SET)
          << result.DebugString();
      if (result.has_error()) {
        ASSERT_FALSE(result.error().message().empty());
        ASSERT_NE(result.error().code(), 0);
      } else {
        kinds_done.insert(result.kind_case());
      }
      if (result.has_join())
        fuzz.generation_ = std::max(fuzz.generation_, result.join().generation());
    }
    for (const Record& record : out.records) {
      ASSERT_GT(record.revision, last_revision);
      last_revision = record.revision;
      v1::JournalRecord parsed;
      ASSERT_TRUE(parsed.ParseFromString(record.payload));
      bool restored = false, skips_jobs = false;
      for (const v1::JournalChange& change : parsed.changes()) {
        restored = restored || change.has_history_restored();
        skips_jobs = skips_jobs || change.job_record_changed().sequence() > 0;
        if (change.has_job_created())
          generations[change.job_created().job_id()] = change.job_created().generation();
        if (change.has_history_restored())
          for (auto& [job, generation] : generations) {
            generation += 65536 + change.history_restored().term();
          }
        if (!change.has_generation_sealed()) continue;
        const v1::GenerationSealed& sealed = change.generation_sealed();
        ASSERT_EQ(sealed.generation(), generations[sealed.job_id()] + 1);
        generations[sealed.job_id()] = sealed.generation();
        std::set<std::string> workers;
        for (int rank = 0; rank < sealed.seats_size(); ++rank) {
          ASSERT_EQ(sealed.seats(rank).rank(), rank);
          ASSERT_TRUE(workers.insert(sealed.seats(rank).worker_id()).second);
        }
      }
      // After a crash behind this record, either the next start is a restored one again, or all
      // that it skips is there.
      ASSERT_TRUE(!restored || skips_jobs) << parsed.ShortDebugString();
      journal.push_back(record.payload);
    }
    for (const NodeDirective& directive : out.directives)
      ASSERT_LE(directive.durable_revision, core->last_record_revision());
    if (out.deposed) {
      // Some operation named a higher term: right, but this test continues with the same
      // coordinator.
    }
    out.Clear();
  };

  const auto node = [&] { return std::string(1, static_cast<char>('n' + fuzz.Draw(4))); };

  core->StartTerm(1, now, &out);
  absorb();
  for (int i = 0; i < 8000 && !HasFatalFailure(); ++i) {
    switch (fuzz.Draw(40)) {
      case 0: {
        v1::Beat beat;
        fuzz.Fill(&beat);
        core->HandleBeat(node(), beat, now, &out);
        break;
      }
      case 1: {
        v1::StackReply stack;
        fuzz.Fill(&stack);
        core->HandleStack("n", stack, now, &out);
        break;
      }
      case 8: {
        v1::Hello hello;
        fuzz.Fill(&hello);
        hello.add_features("hub");
        hello.set_failed_hub(fuzz.Draw(2) == 0 ? node() : "");
        core->AttachAgent(node(), hello, now, &out);
        break;
      }
      case 9:
        if (fuzz.Draw(4) == 0) core->DetachAgent(node(), now, &out);
        break;
      case 2:
        if (!open.empty()) {
          auto it = open.lower_bound(fuzz.Draw(next_call));
          if (it == open.end()) it = open.begin();
          const CallId call = *it;
          core->Abandon(call, now, &out);
          absorb();
          open.erase(call);
        }
        break;
      case 3:
      case 4:
        now += absl::Milliseconds(fuzz.Draw(3000));
        core->Tick(now, &out);
        break;
      case 5: {
        v1::WatchRequest request;
        fuzz.Fill(&request);
        v1::WatchBatch batch;
        core->ReadWatch(request, fuzz.Draw(core->revision() + 2), core->last_record_revision(),
                        fuzz.Draw(2000), &batch);
        v1::WatchJobsRequest jobs;
        fuzz.Fill(&jobs);
        JobsCore::WatchPlace place{.seen = fuzz.Draw(2) == 0 ? jobs.seen_revision()
                                                             : fuzz.Draw(core->revision() + 2)};
        // Reads to the end, whatever it asks for.
        for (int reads = 0; reads < 1000; ++reads) {
          v1::WatchJobsBatch changes;
          const auto error = core->ReadJobs(jobs, nullptr, core->last_record_revision(),
                                            fuzz.Draw(2000), &place, &changes);
          ASSERT_TRUE(error.has_value() || changes.seen_revision() <= core->revision());
          if (error.has_value() || !changes.more()) break;
          ASSERT_LT(reads, 999);
        }
        break;
      }
      case 6:
        if (fuzz.Draw(300) == 0) core->RemoveJob("j", now, &out);
        if (fuzz.Draw(300) == 0) core->CloseJob("k", "closed", now, &out);
        break;
      case 7:
        if (fuzz.Draw(20) == 0) {
          // After a crash, what was written gives the same state again.
          auto next = std::make_unique<Core>(options);
          for (const std::string& record : journal) ASSERT_TRUE(next->Replay(record).ok());
          ASSERT_EQ(Meaning(*core), Meaning(*next)) << "after " << i << " operations";
          auto restored = std::make_unique<Core>(options);
          ASSERT_TRUE(restored->Restore(core->Snapshot()).ok());
          ASSERT_EQ(Meaning(*core), Meaning(*restored)) << "after " << i << " operations";
          SnapshotByReplica(options, *core, journal, &replayed, &parts);
          ASSERT_FALSE(HasFatalFailure()) << "after " << i << " operations";
          core = std::move(next);
          open.clear();
          core->StartTerm(core->last_term() + 1, now, &out, /*restored=*/fuzz.Draw(4) == 0);
        }
        break;
      default: {
        const CallId call = next_call++;
        open.insert(call);
        core->Handle(call, fuzz.Op(), {fuzz.Draw(2) == 0 ? "n" : ""}, now, &out);
      }
    }
    absorb();
  }
  // Nothing waits forever.
  core->RemoveJob("j", now, &out);
  core->RemoveJob("k", now, &out);
  absorb();
  now += absl::Hours(1);
  core->Tick(now, &out);
  absorb();
  for (const std::string job : {"j", "k"}) {
    v1::StatusReply status;
    core->FillStatus(&status);
    for (const v1::JobStatus& one : status.jobs()) EXPECT_NE(one.job_id(), job);
  }
  EXPECT_GE(kinds_done.size(), 12u) << "too few kinds of operations got through";
}

INSTANTIATE_TEST_SUITE_P(Seeds, CoreFuzzTest, ::testing::Range(uint64_t{1}, uint64_t{13}));

}  // namespace
}  // namespace muster::coordinator
