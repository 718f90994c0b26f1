// The worker of the chaos tests: joins, adds to durable counters, passes barriers, acts on
// triggers and keeps a checkpoint, and records each operation before it starts and each answer
// before it continues. After a restart it continues from its checkpoint. Without torch, so that a
// case costs milliseconds.
#include <fcntl.h>
#include <grpcpp/client_context.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/broken_pipe.h"
#include "base/clock.h"
#include "base/defaults.h"
#include "base/failpoint.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"
#include "tests/chaos/watcher.h"
#include "tests/chaos/weights.h"
#include "worker/job/coordinator_client.h"

namespace muster::chaos {
namespace {

constexpr absl::Duration kBarrierTimeout = absl::Seconds(60);
// Longer than the longest outage.
constexpr absl::Duration kTxnTimeout = absl::Seconds(150);

struct Flags {
  std::string address, job = "chaos", dir;
  std::string watch;
  int index = 0;
  int world = 2;
  int rounds = 20;
  double lease = 5;
  double outage_tolerance = absl::ToDoubleSeconds(kDefaultOutageTolerance);
  uint64_t incarnation = 0;  // 0: the client draws one
};

// Reads the variables that an agent sets for its workers.
bool FromAgent(Flags* flags) {
  const auto variable = [](const char* name) {
    const char* const value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  flags->address = variable("MUSTER_COORDINATOR");
  flags->job = variable("MUSTER_JOB");
  return !flags->address.empty() && absl::SimpleAtoi(variable("RANK"), &flags->index) &&
         absl::SimpleAtoi(variable("WORLD_SIZE"), &flags->world) &&
         absl::SimpleAtoi(variable("MUSTER_INCARNATION"), &flags->incarnation);
}

class Worker {
 public:
  explicit Worker(Flags flags)
      : flags_(std::move(flags)),
        id_(absl::StrCat("w", flags_.index)),
        checkpoint_(absl::StrCat(flags_.dir, "/", id_, ".checkpoint")) {
    history_ = open(absl::StrCat(flags_.dir, "/", id_, ".history").c_str(),
                    O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    MUSTER_CHECK(history_ >= 0) << flags_.dir;
  }

  absl::Status Run() {
    if (PathExists(checkpoint_)) {
      MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadFile(checkpoint_));
      for (const absl::string_view word : absl::StrSplit(text, ' ', absl::SkipEmpty())) {
        if (!absl::SimpleHexAtoi(word, &weights_.emplace_back())) {
          return absl::DataLossError(absl::StrCat("checkpoint '", text, "' cannot be read"));
        }
      }
      done_ = static_cast<int>(weights_.size()) - 1;
    }
    if (done_ == flags_.rounds - 1) return End();  // it died after its last step
    CoordinatorClient::Options options;
    options.address = flags_.address;
    options.job = flags_.job;
    options.worker_id = id_;
    options.incarnation = flags_.incarnation;
    options.heartbeat_period = absl::Seconds(flags_.lease) / 5;
    options.outage_tolerance = absl::Seconds(flags_.outage_tolerance);
    options.on_generation_ended = [](uint64_t, const absl::Status&) {};
    MUSTER_ASSIGN_OR_RETURN(client_, CoordinatorClient::Connect(options));
    MUSTER_ASSIGN_OR_RETURN(channel_, rpc::Connect(flags_.address));
    kv_ = v1::KeyValueStore::NewStub(channel_);
    if (!flags_.watch.empty()) watcher_.emplace(flags_.watch, flags_.job, "count/");
    Write("start ", client_->incarnation());
    for (int attempt = 0; attempt < 20; ++attempt) {
      JoinOptions join;
      join.min_workers = join.max_workers = flags_.world;
      join.lease = absl::Seconds(flags_.lease);
      join.preferred_rank = flags_.index;
      join.host = absl::StrCat("host", flags_.index);
      join.timeout = absl::Seconds(60);
      absl::Status status;
      if (const absl::StatusOr<Seat> seat = client_->Join(join); seat.ok()) {
        Write("seat ", seat->generation, " ", seat->rank);
        promised_.clear();
        status = Work(*seat);
        if (status.ok()) {
          MUSTER_RETURN_IF_ERROR(End());
          // The worker was taken for lost after its last barrier: there is nothing left to leave.
          const absl::Status left = client_->Leave("done");
          return IsOver(left) ? absl::OkStatus() : left;
        }
      } else {
        status = seat.status();
      }
      Write("again ", status.ToString());
      // Another process took this one's place, so it must go. Any other reason why a generation
      // ends is met again in the next one.
      if (rpc::GetReason(status) == v1::ERROR_REASON_SUPERSEDED) return status;
      if (!IsOver(status)) return status;
    }
    return absl::InternalError("no generation lived long enough");
  }

 private:
  // Returns whether the generation, or this worker's part in it, has ended.
  static bool IsOver(const absl::Status& status) {
    return status.code() == absl::StatusCode::kAborted ||
           status.code() == absl::StatusCode::kFailedPrecondition;
  }
  // Returns the weights after `rounds` rounds.
  uint64_t WeightsAfter(int rounds) const {
    return rounds == 0 ? kFirstWeights : weights_[static_cast<size_t>(rounds) - 1];
  }
  absl::Status End() {
    Write("end");
    std::printf("weights %s\n", absl::StrCat(absl::Hex(weights_.back())).c_str());
    std::fflush(stdout);
    return absl::OkStatus();
  }

  template <typename... Parts>
  void Write(const Parts&... parts) {
    const std::string line = absl::StrCat(parts..., "\n");
    MUSTER_CHECK(write(history_, line.data(), line.size()) == static_cast<ssize_t>(line.size()));
  }

  absl::Status Work(const Seat& seat) {
    // All continue after the last round that every worker has finished.
    MUSTER_ASSIGN_OR_RETURN(const BarrierResult start,
                            Pass(seat, "start", absl::StrCat("done ", done_)));
    int first = flags_.rounds;
    for (const std::string& payload : start.payloads) {
      int done = 0;
      if (!absl::SimpleAtoi(payload.substr(5), &done)) return absl::DataLossError(payload);
      first = std::min(first, done + 1);
    }
    weights_.resize(first);
    for (int round = first; round < flags_.rounds; ++round) {
      std::printf("round %d\n", round);
      std::fflush(stdout);
      client_->ReportProgress(round, "round");
      // This beat comes in addition to those of the client's own thread, which a short run may not
      // reach.
      MUSTER_RETURN_IF_ERROR(client_->Beat().status());
      MUSTER_RETURN_IF_ERROR(AddDurably(seat));
      MUSTER_RETURN_IF_ERROR(Meet(seat, round));
      MUSTER_RETURN_IF_ERROR(FollowTriggers(seat, round));
      const uint64_t before = WeightsAfter(round);
      MUSTER_ASSIGN_OR_RETURN(const BarrierResult result,
                              Pass(seat, "round", ChaosPayload(seat.rank, round, before)));
      uint64_t weights = before;
      for (int rank = 0; rank < seat.world_size; ++rank) {
        const std::string expected = ChaosPayload(rank, round, before);
        if (rank >= static_cast<int>(result.payloads.size()) || result.payloads[rank] != expected) {
          return absl::DataLossError(absl::StrCat("barrier of round ", round, ": rank ", rank,
                                                  " should have brought '", expected,
                                                  "': ", absl::StrJoin(result.payloads, " | ")));
        }
        weights = FoldWeights(weights, result.payloads[rank]);
      }
      weights_.push_back(weights);
      done_ = round;
      if (round % 5 == 4) {
        MUSTER_RETURN_IF_ERROR(WriteFileAtomically(
            checkpoint_, absl::StrJoin(weights_, " ", [](std::string* out, uint64_t w) {
              absl::StrAppend(out, absl::Hex(w));
            })));
      }
    }
    return Pass(seat, "end", "").status();
  }

  absl::StatusOr<BarrierResult> Pass(const Seat& seat, const std::string& name,
                                     const std::string& payload) {
    MUSTER_ASSIGN_OR_RETURN(BarrierResult result, client_->Barrier(name, kBarrierTimeout, payload));
    // The counter of the instance is the number of results seen of this name and generation.
    Write("barrier ", seat.generation, " ", name, " ", passed_[{seat.generation, name}]++, " ",
          absl::StrJoin(result.payloads, "|"));
    return result;
  }

  // Adds 1 to its own counter and index + 1 to the common sum: both or neither.
  absl::Status AddDurably(const Seat& seat) {
    v1::TxnRequest request;
    v1::AddOp& own = *request.add_then()->mutable_add();
    own.set_key("count/" + id_);
    own.set_delta(1);
    own.set_klass(v1::KV_CLASS_DURABLE);
    v1::AddOp& sum = *request.add_then()->mutable_add();
    sum.set_key("sum");
    sum.set_delta(flags_.index + 1);
    sum.set_klass(v1::KV_CLASS_DURABLE);
    Write("add-begin");
    const absl::StatusOr<v1::TxnReply> reply = Txn(seat, std::move(request));
    if (reply.ok()) {
      const int64_t count = reply->results(0).number();
      Write("add-ack ", count);
      if (watcher_.has_value() && !watcher_->WaitFor("count/" + id_, count, kTxnTimeout)) {
        return absl::DataLossError(absl::StrCat("the watch never came to ", count, " of count/",
                                                id_, ": ", watcher_->violation()));
      }
    } else if (!rpc::IsLost(reply.status()) &&
               reply.status().code() != absl::StatusCode::kDeadlineExceeded) {
      Write("add-refused ", reply.status().ToString());
    }
    return reply.status();
  }

  // The client has no transaction of several additions. This one is repeated with the same request
  // id until it is answered.
  absl::StatusOr<v1::TxnReply> Txn(const Seat& seat, v1::TxnRequest request) {
    v1::Fence& fence = *request.mutable_fence();
    fence.set_job_id(flags_.job);
    fence.set_generation(seat.generation);
    fence.set_worker_id(id_);
    fence.set_incarnation(client_->incarnation());
    // Higher than the ids of the client, which counts on its own.
    fence.set_request_id((uint64_t{1} << 40) + ++requests_);
    const absl::Time deadline = Clock::Real().Now() + kTxnTimeout;
    for (;;) {
      grpc::ClientContext context;
      context.set_wait_for_ready(true);
      rpc::SetTimeout(context, kTxnTimeout);
      v1::TxnReply reply;
      const absl::Status status = rpc::FromGrpc(kv_->Txn(&context, request, &reply));
      if (status.ok()) return reply;
      if (!rpc::IsLost(status) || Clock::Real().Now() > deadline) return status;
      Notification().WaitForNotificationWithTimeout(absl::Milliseconds(20));
    }
  }

  // Writes every worker's key of this round, and a private key that must hold its last value.
  absl::Status Meet(const Seat& seat, int round) {
    const auto key = [&](int rank) {
      return absl::StrCat(seat.key_prefix, "meet/", round, "/", rank);
    };
    MUSTER_RETURN_IF_ERROR(client_->Set(key(seat.rank), absl::StrCat(seat.rank)));
    const std::string mine = absl::StrCat(seat.key_prefix, "mine/", seat.rank);
    MUSTER_RETURN_IF_ERROR(client_->Set(mine, absl::StrCat(round)));
    std::vector<std::string> keys;
    for (int rank = 0; rank < seat.world_size; ++rank) keys.push_back(key(rank));
    MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> values,
                            client_->Wait(keys, kBarrierTimeout));
    for (int rank = 0; rank < seat.world_size; ++rank) {
      if (values[rank] != absl::StrCat(rank)) return absl::DataLossError(values[rank]);
    }
    MUSTER_ASSIGN_OR_RETURN(const std::optional<std::string> found, client_->Find(mine));
    if (found != absl::StrCat(round)) {
      return absl::DataLossError(
          absl::StrCat(mine, " was put as ", round, " and is read as ", found.value_or("nothing")));
    }
    return absl::OkStatus();
  }

  absl::Status FollowTriggers(const Seat& seat, int round) {
    if (seat.rank == 0 && round == flags_.rounds / 2 && !raised_) {
      MUSTER_ASSIGN_OR_RETURN(const uint64_t id, client_->RaiseTrigger("checkpoint", "now"));
      Write("raised ", id);
      raised_ = true;
    }
    // Steps count from 1: `round` of them are finished. A trigger that is not decided yet is
    // promised not to be overtaken: the step after this one begins when it is.
    const int64_t step = round + 1;
    for (bool again = true; again;) {
      again = false;
      TriggerPoll poll = {.step = round};
      for (const auto& [id, horizon] : promised_) {
        poll.pending.push_back(id);
        poll.horizon = poll.horizon == 0 ? horizon : std::min(poll.horizon, horizon);
      }
      poll.acknowledged.assign(acted_.begin(), acted_.end());
      MUSTER_ASSIGN_OR_RETURN(const std::vector<TriggerInfo> triggers, client_->PollTriggers(poll));
      for (const TriggerInfo& trigger : triggers) {
        if (trigger.effective_step < 0) {
          const bool is_new = promised_.emplace(trigger.id, step + 1).second;
          if (!is_new && promised_[trigger.id] <= step) {
            again = true;
            Notification().WaitForNotificationWithTimeout(absl::Milliseconds(2));
          }
          again = again || is_new;
          continue;
        }
        promised_.erase(trigger.id);
        if (trigger.effective_step > step || !acted_.insert(trigger.id).second) continue;
        Write("act ", seat.generation, " ", trigger.id, " ", step, " ", trigger.effective_step);
      }
    }
    return absl::OkStatus();
  }

  const Flags flags_;
  const std::string id_;
  const std::string checkpoint_;
  int history_ = -1;
  int done_ = -1;
  std::vector<uint64_t> weights_;  // after each round
  uint64_t requests_ = 0;
  bool raised_ = false;
  std::set<uint64_t> acted_;
  std::map<uint64_t, int64_t> promised_;  // trigger -> the step that waits for its decision
  std::map<std::pair<uint64_t, std::string>, int> passed_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::KeyValueStore::Stub> kv_;
  std::unique_ptr<CoordinatorClient> client_;
  std::optional<Watcher> watcher_;
};

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("The worker of the chaos tests.");
  app.add_option("--address", flags.address, "where no agent says it");
  app.add_option("--watch", flags.watch, "the coordinator's own address, which serves watches");
  app.add_option("--dir", flags.dir)->required();
  app.add_option("--index", flags.index);
  app.add_option("--world", flags.world);
  app.add_option("--rounds", flags.rounds);
  app.add_option("--lease", flags.lease);
  app.add_option("--outage_tolerance", flags.outage_tolerance);
  CLI11_PARSE(app, argc, argv);
  if (flags.address.empty() && !FromAgent(&flags)) {
    std::fprintf(stderr, "--address, or an agent, is needed\n");
    return 2;
  }
  std::printf("pid %d\n", getpid());
  std::fflush(stdout);
  SetLogIdentity(absl::StrCat("w", flags.index));
  SurviveBrokenPipes();
  absl::Status status = ArmFailpointsFromEnvironment();
  if (status.ok()) status = Worker(flags).Run();
  if (status.ok()) return 0;
  std::fprintf(stderr, "w%d: %s\n", flags.index, status.ToString().c_str());
  return 1;
}

}  // namespace
}  // namespace muster::chaos

int main(int argc, char** argv) { return muster::chaos::Main(argc, argv); }
