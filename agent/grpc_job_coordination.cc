#include "agent/grpc_job_coordination.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/agents_job.h"
#include "agent/attempt_state.h"
#include "agent/coordination_values.h"
#include "agent/end_watch.h"
#include "agent/generation_end.h"
#include "agent/machines.h"
#include "agent/newcomers.h"
#include "base/clock.h"
#include "base/failpoint.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "base/timer_thread.h"
#include "proto/muster/v1/session.pb.h"
#include "rpc/session/duration.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

constexpr absl::Duration kShortCall = absl::Seconds(5);
constexpr absl::Duration kAgree = absl::Seconds(30);  // in addition to a tolerated outage
constexpr absl::Duration kLongest = absl::Hours(24);  // the longest timeout of a call
// A job of one node has no other node to wait for.
constexpr absl::Duration kFirstContact = absl::Seconds(30);
constexpr size_t kMostOfLine = 1024;  // of a program's output; the coordinator keeps no more
constexpr absl::Duration kPollPeriod = absl::Seconds(1);  // between looks for newcomers
// After this many looks, every machine has noticed that this one does not wait for a place.
constexpr int kPollsOfAll = 3;
constexpr absl::Duration kHeardPollPeriod =
    absl::Milliseconds(200);  // between looks at signs of life

class GrpcJobCoordination final : public JobCoordination {
 public:
  GrpcJobCoordination(const GrpcJobCoordinationOptions& options, NodeUplink* session)
      : options_(options),
        session_(session),
        hostname_(HostName()),
        agents_(SelfOf(options, hostname_), &session->sender(), attempt_) {
    if (options.num_nodes > 1) {
      end_watch_ = std::make_unique<EndWatch>(attempt_, &session->sender(), elastic());
    }
  }

  ~GrpcJobCoordination() override {
    StopWatching();
    end_watch_.reset();
    if (agents_.generation() != 0) agents_.Leave(absl::Seconds(1));
  }

  absl::StatusOr<Meeting> Meet(int attempt, const RestartCounts& counted) override {
    StopWatching();
    const std::string again = WhyAgain();
    MUSTER_RETURN_IF_ERROR(AwaitCoordinator(attempt));
    Meeting meeting;
    meeting.attempt = attempt;
    meeting.counted = counted;
    if (options_.num_nodes == 1) {
      MUSTER_ASSIGN_OR_RETURN(meeting.master_port, FindFreePort());
      meeting.launch = Launch();
      return meeting;
    }
    if (attempt > 0) {
      // Otherwise the next attempt would begin inside the generation that fails.
      agents_.EndGeneration(again, options_.outage_tolerance + kShortCall, Until::kCancelled);
    } else if (FinishedBefore()) {
      meeting.finished = true;
      return meeting;
    } else if (elastic()) {
      if (options_.another_is_first) MUSTER_RETURN_IF_ERROR(AwaitFirst());
      MUSTER_RETURN_IF_ERROR(CompareSettings());
    }
    while (true) {
      // Read only once, so that a machine that was away compares with what it knew before.
      if (elastic() && !finished_before_.has_value()) finished_before_ = agents_.Finished();
      const absl::Status joined = Join(&meeting.finished);
      if (meeting.finished) return meeting;
      if (absl::IsDeadlineExceeded(joined) && elastic() && options_.hosts_coordinator) {
        MUSTER_ASSIGN_OR_RETURN(meeting.finished, ServeOthers(joined));
        if (meeting.finished) return meeting;
        continue;
      }
      MUSTER_RETURN_IF_ERROR(joined);
      // The other machines finished while this one waited for a place.
      if (elastic() && FinishedSince()) {
        // Another machine that joined with this one would wait for it.
        agents_.EndGeneration("the job was done before", kShortCall, Until::kAnswered);
        meeting.finished = true;
        return meeting;
      }
      if (asks_itself_.has_value() && num_nodes_ == 1) {
        // The others have ended for good while this machine waited, and it does not know their
        // counts: the job would begin again after its last restart.
        agents_.EndGeneration("the others have ended", kShortCall, Until::kAnswered);
        return *asks_itself_;
      }
      asks_itself_.reset();
      logged_serving_ = false;
      meeting.node_rank = node_rank_;
      meeting.num_nodes = num_nodes_;
      absl::Status agreed = Agree(&meeting);
      if (agreed.ok()) break;
      // A machine, maybe this one, was lost before the attempt began: the machines meet again.
      const v1::ErrorReason reason = rpc::GetReason(agreed);
      const bool generation_ended = reason == v1::ERROR_REASON_GENERATION_ENDED;
      if (elastic() && (generation_ended || IsCutOff(reason))) continue;
      // If the number of machines is fixed, Join waits for the lost one to come back.
      if (options_.counts_restarts && generation_ended && HasCulprit(agreed)) continue;
      agents_.EndGeneration(absl::StrCat("machine ", node_rank_, " gave up: ", agreed.message()),
                            kShortCall, Until::kAnswered);
      return agreed;
    }
    return meeting;
  }

  void Watch(std::function<void(AttemptEnd)> on_ended) override {
    attempt_->Begin(std::move(on_ended));
    reported_end_.reset();
    NodeUplink::Listener listener;
    listener.on_lost = [attempt = attempt_](const absl::Status& status) {
      attempt->End({std::string(status.message()), {}});
    };
    if (options_.num_nodes > 1) {
      listener.on_generation_ended = [attempt = attempt_, job = agents_.name(),
                                      generation = agents_.generation(),
                                      elastic = elastic()](const v1::GenerationEnded& ended) {
        if (ended.job_id() != job || ended.generation() < generation) return;
        attempt->End(EndOfGeneration(elastic, ended.why(), ended.culprits_size() > 0));
      };
    }
    session_->SetListener(std::move(listener));
    if (end_watch_ != nullptr) end_watch_->Start(agents_.Wait({agents_.EndKey()}, kLongest));
    if (elastic() && node_rank_ == 0 && num_nodes_ < options_.num_nodes) {
      grow_from_ = Clock::Real().Now() + options_.grow_after;
      grow_timer_ = std::make_unique<TimerThread>([this] { return LookForMachines(); });
      grow_timer_->Start();
    }
  }

  void ReportEnd(const WorkerEnd& end) override {
    MUSTER_FAILPOINT("agent.report_exit");
    session_->WorkerEnded(options_.job, end.worker_id, end.incarnation);
    v1::Op op;
    v1::ReportExitRequest& request = *op.mutable_report_exit();
    v1::Fence* const fence = request.mutable_fence();
    fence->set_job_id(options_.job);
    fence->set_worker_id(end.worker_id);
    fence->set_incarnation(end.incarnation);
    request.set_worker_id(end.worker_id);
    request.set_incarnation(end.incarnation);
    v1::ExitCause* const cause = request.mutable_cause();
    cause->set_exit_code(end.exit.exit_code);
    cause->set_signal(end.exit.signal);
    cause->set_may_restart(end.may_restart);
    // Programs may write anything; a message takes only UTF-8.
    cause->set_message(OneLine(end.ToString()));
    for (const std::string& line : end.last_lines) {
      cause->add_last_log_lines(Printable(line, kMostOfLine));
    }
    // If the program never joined, the coordinator does not know it, which does not matter.
    session_->sender().Submit(std::move(op), [](const v1::OpResult& result) {
      if (result.has_error()) MUSTER_LOG(Debug) << "ReportExit: " << result.error().message();
    });
  }

  AttemptEnd Fail(const AttemptEnd& given) override {
    MUSTER_FAILPOINT("agent.fail");
    AttemptEnd end = given;
    if (elastic() && end.cause == AttemptEnd::Cause::kFailed) JudgeCause(&end);
    if (elastic()) {
      if (std::optional<AttemptEnd> ended = attempt_->ended()) return *std::move(ended);
    }
    reported_end_ = WriteEnd(end);
    return *reported_end_;
  }

  absl::Status Finish() override {
    MUSTER_FAILPOINT("agent.finish");
    if (options_.num_nodes == 1) return absl::OkStatus();
    absl::Status status = elastic() ? agents_.WriteDone() : absl::OkStatus();
    if (status.ok()) status = agents_.AwaitAll(node_rank_);
    // The refusal may arrive before any other news of the end, and all machines must count the
    // same.
    if (std::optional<AttemptEnd> end = EndOfRefused(elastic(), status)) {
      attempt_->End(*std::move(end));
    }
    if (status.ok() && elastic()) agents_.WriteFinished();
    return status;
  }

  void Cancel() override { attempt_->Cancel(); }

 private:
  using Until = AttemptState::Until;

  // Two launches with the same machine rank are the same worker: the first one gets SUPERSEDED.
  static AgentsJob::Options SelfOf(const GrpcJobCoordinationOptions& options,
                                   const std::string& hostname) {
    const uint64_t incarnation = RandomId();
    return {.coordinator = options.coordinator,
            .job = options.job,
            .worker_id = options.node_rank >= 0 ? absl::StrCat("node", options.node_rank)
                                                : absl::StrCat("node-", hostname, "-", incarnation),
            .incarnation = incarnation};
  }

  // Includes an agent that may not restart: machine 0, launched differently by mistake, would wait
  // for it.
  bool tells_counts() const { return agrees_on_counts() || options_.counts_itself; }
  bool agrees_on_counts() const { return elastic() || options_.counts_restarts; }
  bool elastic() const { return options_.min_nodes > 0 && options_.min_nodes < options_.num_nodes; }

  // Whether the job has finished since the first meeting.
  bool FinishedSince() {
    if (!finished_before_.has_value()) return false;
    const std::optional<std::string> now = agents_.Finished();
    // Empty: the job was removed, and another one with its name has begun.
    return now.has_value() && !now->empty() && *now != *finished_before_;
  }

  // Blocks while other machines have places, because without this process they would lose their
  // coordinator. Returns true if all of them are done; false if this machine may join, because they
  // meet again, or because they have room for it and nothing prevents it any longer. Errors:
  // `no_place` if no machine is left.
  absl::StatusOr<bool> ServeOthers(const absl::Status& no_place) {
    for (int looks = 1;; ++looks) {
      const absl::StatusOr<std::vector<v1::Member>> members = agents_.Machines(Until::kCancelled);
      if (absl::IsCancelled(members.status())) return members.status();
      if (absl::IsNotFound(members.status())) return no_place;  // the group was removed
      if (members.ok()) {
        const Others others = LookAtOthers(*members, options_.lease + options_.outage_tolerance);
        // After reading the members, because they leave when they are done.
        if (FinishedSince()) return true;
        if (others.meet_again || (others.running == 0 && others.any_waits)) {
          asks_itself_.reset();
          return false;
        }
        if (others.running == 0) return no_place;
        // Now this machine asks for a place as a newcomer, for which the others start again
        // (LookForMachines). That is useless while its host is quarantined.
        if (looks >= kPollsOfAll && others.running < options_.num_nodes &&
            session_->IsQuarantined(agents_.name(), hostname_) == false) {
          asks_itself_ = no_place;
          return false;
        }
        if (!std::exchange(logged_serving_, true)) {
          MUSTER_LOG(Warning) << no_place.message()
                              << "; this machine hosts the coordinator, so it "
                              << "keeps serving the " << others.running
                              << " machines that have a place";
        }
      }
      attempt_->Pause(kPollPeriod, Until::kCancelled);
      if (attempt_->cancelled()) return absl::CancelledError("stopped");
    }
  }

  AttemptEnd WriteEnd(const AttemptEnd& end) {
    if (options_.num_nodes == 1) return end;
    // A job that ends does not wait for a coordinator that is away.
    const absl::Duration patience = session_->stream().connected() ? kShortCall : absl::Seconds(1);
    const absl::StatusOr<AttemptEnd> written = agents_.WriteEnd(end, patience);
    if (!written.ok()) {
      MUSTER_LOG(Debug) << "cannot notify the other machines: " << written.status().message();
      if (!elastic()) {
        // Another machine was first, and has ended the generation to meet again.
        const std::optional<AttemptEnd> first = EndOfRefused(false, written.status());
        if (!first.has_value()) return end;
        return attempt_->ended().value_or(*first);
      }
      if (std::optional<AttemptEnd> ended = attempt_->ended()) return *std::move(ended);
      // No other machine counts the failure here, because this machine was away.
      if (IsCutOff(rpc::GetReason(written.status()))) {
        if (end.cause != AttemptEnd::Cause::kFailed) return end;
        return {absl::StrCat("this machine was cut off from the others, and ", end.why),
                end.last_lines, AttemptEnd::Cause::kMachineLost};
      }
      return EndOfRefused(true, written.status()).value_or(end);
    }
    return *written;
  }

  // Returns why the watched attempt has ended, for machines that have not learned it.
  std::string WhyAgain() {
    if (reported_end_.has_value()) return AnotherBegins(*reported_end_);
    const std::optional<AttemptEnd> ended = attempt_->ended();
    return ended.has_value() && !ended->why.empty() ? AnotherBegins(*ended)
                                                    : "another attempt begins";
  }

  // Machine 0 may start last: until then no coordinator answers.
  absl::Status AwaitCoordinator(int attempt) {
    const absl::Duration timeout = options_.num_nodes == 1 && attempt == 0
                                       ? std::min(options_.join_timeout, kFirstContact)
                                       : options_.join_timeout;
    const absl::Time start = Clock::Real().Now();
    const absl::Time give_up = start + timeout;
    absl::Time tell_at = start + options_.tell_after;
    bool told = false;
    while (true) {
      if (attempt_->cancelled()) return absl::CancelledError("stopped");
      const absl::Time now = Clock::Real().Now();
      const absl::Duration left = give_up - now;
      const absl::Status status = session_->stream().WaitUntilConnected(
          std::clamp(left, absl::ZeroDuration(), absl::Milliseconds(100)));
      if (status.ok() || !absl::IsUnavailable(status) || session_->stream().ended()) return status;
      const bool lost = session_->stream().ever_connected();
      if (lost && !std::exchange(told, true)) {
        MUSTER_LOG(Warning) << "waiting up to " << absl::FormatDuration(timeout)
                            << " for the coordinator to come back: " << status.message();
      }
      if (left <= absl::ZeroDuration() && lost) return status;
      if (left > absl::ZeroDuration() && (lost || now < tell_at)) continue;
      std::string why = session_->stream().last_error();
      if (why.empty()) why = session_->WhyNotConnected();
      const std::string cause = why.empty() ? "" : absl::StrCat(" (", why, ")");
      const char* const hint = options_.num_nodes == 1
                                   ? ": is it running, and is the address right?"
                                   : ": is machine 0 launched, and is the address right?";
      if (left <= absl::ZeroDuration()) {
        return absl::UnavailableError(absl::StrCat("no coordinator answers at ",
                                                   options_.coordinator, " after ",
                                                   absl::FormatDuration(timeout), hint, cause));
      }
      MUSTER_LOG(Warning) << "no coordinator answers at " << options_.coordinator << " for "
                          << absl::FormatDuration(absl::Floor(now - start, absl::Seconds(1)))
                          << hint << " Waiting up to " << absl::FormatDuration(timeout) << cause;
      tell_at = now + options_.tell_again;
    }
  }

  // Calls an operation that waits for other machines; returns nullopt if they have finished
  // meanwhile. The machine that hosts the coordinator has to find that out itself.
  std::optional<absl::StatusOr<v1::OpResult>> CallUnlessFinished(v1::Op op,
                                                                 absl::Duration timeout) {
    if (!elastic() || !options_.hosts_coordinator) {
      return agents_.Call(std::move(op), timeout, Until::kCancelled);
    }
    return agents_.CallUnless([this] { return FinishedSince(); }, kPollPeriod, std::move(op),
                              timeout);
  }

  // Whether this agent was started again after all nodes, and its previous start, had arrived at
  // the end of the job, but the previous start died before it could leave. The others will not come
  // back, so this agent must not wait for them. A node that left, one that comes after all waiting
  // is over, and one for which others already wait, take part in another run of the job.
  bool FinishedBefore() {
    if (options_.node_rank < 0) return false;  // other nodes cannot be told apart
    if (!agents_.AllHavePassed()) return false;
    const absl::StatusOr<std::vector<v1::Member>> members = agents_.Machines(Until::kCancelled);
    return members.ok() && DiedBeforeItLeft(*members, agents_.worker_id(), options_.join_timeout);
  }

  // Waits until the machine with the coordinator has a place or waits for one: it gets one before
  // others that come later, and keeps it. Without it there would be no job.
  absl::Status AwaitFirst() {
    const absl::Time give_up = Clock::Real().Now() + options_.join_timeout;
    while (true) {
      const absl::StatusOr<std::vector<v1::Member>> members = agents_.Machines(Until::kCancelled);
      if (absl::IsCancelled(members.status())) return members.status();
      if (members.ok() && CoordinatorsLaunchHasCome(*members)) return absl::OkStatus();
      if (Clock::Real().Now() >= give_up) {
        return absl::DeadlineExceededError(absl::StrCat(
            "the launch with the coordinator of job ", options_.job, " has not joined it within ",
            absl::FormatDuration(options_.join_timeout)));
      }
      attempt_->Pause(kHeardPollPeriod, Until::kCancelled);
      if (attempt_->cancelled()) return absl::CancelledError("stopped");
    }
  }

  // INVALID_ARGUMENT: `self` was launched with other settings than machine 0, which wrote `theirs`.
  absl::Status CompareWith(const SettingsValue& theirs, absl::string_view self) {
    const bool both_say = !theirs.debug.empty() && !options_.debug.empty();
    if (theirs.settings == options_.settings && (!both_say || theirs.debug == options_.debug)) {
      return absl::OkStatus();
    }
    const auto described = [both_say](const std::string& settings, const std::string& debug) {
      return both_say ? absl::StrCat(settings, ", debug ", debug) : settings;
    };
    return absl::InvalidArgumentError(
        absl::StrCat(self, " was launched with ", described(options_.settings, options_.debug),
                     ", but machine 0 with ", described(theirs.settings, theirs.debug),
                     ": launch all machines with the same settings"));
  }

  // Checks that this machine was launched like those that run, if any do: otherwise they would be
  // stopped for a machine that cannot take part.
  absl::Status CompareSettings() {
    const absl::StatusOr<std::vector<std::string>> all = agents_.AllSettings();
    if (absl::IsCancelled(all.status())) return all.status();
    // Without an answer, Agree compares them later.
    if (!all.ok()) return absl::OkStatus();
    for (const std::string& one : *all) {
      const std::optional<SettingsValue> theirs = SettingsFromValue(one);
      if (!theirs.has_value()) continue;
      MUSTER_RETURN_IF_ERROR(CompareWith(*theirs, "this machine"));
    }
    return absl::OkStatus();
  }

  // A failure here may be the way in which this machine notices the loss of another one, whose
  // agent then falls silent. Returns when that is decided.
  void JudgeCause(AttemptEnd* end) {
    const absl::Time start = Clock::Real().Now();
    while (num_nodes_ > 1) {
      // Taken before the call: an age is as of its answer.
      const absl::Duration elapsed = Clock::Real().Now() - start;
      const absl::StatusOr<std::vector<v1::Member>> members = agents_.Machines(Until::kEnded);
      if (members.ok()) {
        const Signs signs = SignsOfOthers(*members, agents_.worker_id(), elapsed);
        if (signs.lost.has_value()) {
          end->cause = AttemptEnd::Cause::kMachineLost;
          end->why = absl::StrCat("machine ", signs.lost->rank(), " on ", signs.lost->host(),
                                  " is lost, and ", end->why);
          return;
        }
        if (signs.all_heard) return;
      }
      if (elapsed > options_.lease + kShortCall) return;
      attempt_->Pause(kHeardPollPeriod, Until::kEnded);
      if (attempt_->ended().has_value()) return;
      if (attempt_->cancelled()) {
        // The failure was not judged, and this machine leaves: the others have nothing to count.
        end->cause = AttemptEnd::Cause::kMachineLeft;
        end->why = absl::StrCat("the launch was stopped on ", hostname_, " after ", end->why);
        return;
      }
    }
  }

  // The tick of machine 0's timer: ends the attempt if a machine waits for a place that the job
  // has.
  absl::Time LookForMachines() {
    const absl::Time now = Clock::Real().Now();
    if (now < grow_from_) return grow_from_;
    const absl::StatusOr<std::vector<v1::Member>> members = agents_.Machines(Until::kEnded);
    if (!members.ok()) return now + kPollPeriod;
    const std::optional<v1::Member> newcomer =
        newcomers_.Choose(*members, now, [this](const std::string& host) {
          return session_->IsQuarantined(agents_.name(), host) == true;
        });
    if (!newcomer.has_value()) return now + kPollPeriod;
    const AttemptEnd end = {
        absl::StrCat("another machine has come, ", newcomer->host(), ", to the ", num_nodes_,
                     " of at most ", options_.num_nodes),
        {},
        AttemptEnd::Cause::kMachineCame};
    // Machines that have already finished do not start again.
    if (!agents_.WriteEndUnlessDone(end)) return now + kPollPeriod;
    newcomers_.Came(*newcomer, *members, now);
    attempt_->End(end);
    return absl::InfiniteFuture();
  }

  // `finished`: set if all machines are done meanwhile, without this one.
  absl::Status Join(bool* finished) {
    v1::Op op;
    v1::JoinRequest& request = *op.mutable_join();
    v1::RendezvousSpec* const spec = request.mutable_spec();
    spec->set_min_workers(elastic() ? options_.min_nodes : options_.num_nodes);
    spec->set_max_workers(options_.num_nodes);
    if (elastic()) *spec->mutable_last_call() = rpc::ToProto(options_.last_call);
    *spec->mutable_join_timeout() = rpc::ToProto(options_.join_timeout);
    spec->set_end_generation_on_failure(true);
    *spec->mutable_lease() = rpc::ToProto(options_.lease);
    *spec->mutable_outage_tolerance() = rpc::ToProto(options_.outage_tolerance);
    request.mutable_topology()->set_host(hostname_);
    request.mutable_topology()->set_rack(options_.rack);
    request.mutable_topology()->set_nvlink_domain(options_.nvlink_domain);
    request.mutable_topology()->set_local_world_size(1);
    request.set_endpoint(options_.host);
    request.set_pid(getpid());
    request.set_preferred_rank(node_rank_ >= 0 ? node_rank_ : options_.node_rank);
    *request.mutable_fence() = agents_.Fence();
    request.mutable_fence()->set_generation(0);
    const std::optional<absl::StatusOr<v1::OpResult>> answered =
        CallUnlessFinished(std::move(op), options_.join_timeout + kShortCall);
    *finished = !answered.has_value();
    if (*finished) return absl::OkStatus();
    const absl::StatusOr<v1::OpResult>& result = *answered;
    const absl::Status& status = result.status();
    if (status.ok()) {
      node_rank_ = result->join().rank();
      num_nodes_ = elastic() ? result->join().world_size() : options_.num_nodes;
      agents_.Sit(result->join());
      return status;
    }
    if (rpc::GetReason(status) == v1::ERROR_REASON_SUPERSEDED) {
      return absl::InvalidArgumentError(
          absl::StrCat("another launch with machine_rank ", options_.node_rank,
                       " took this one's place in job ", options_.job));
    }
    if (absl::IsInvalidArgument(status)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the machines of job ", options_.job, " were launched differently: ", status.message()));
    }
    if (absl::IsDeadlineExceeded(status) && elastic()) {
      return absl::DeadlineExceededError(absl::StrCat(
          "no place among the machines of job ", options_.job, " within ",
          absl::FormatDuration(options_.join_timeout), ", which needs ", options_.min_nodes, " to ",
          options_.num_nodes, ": ", OfMachines(status.message())));
    }
    if (absl::IsDeadlineExceeded(status)) {
      return absl::DeadlineExceededError(absl::StrCat(
          "not all ", options_.num_nodes, " machines arrived within ",
          absl::FormatDuration(options_.join_timeout), ": ", OfMachines(status.message())));
    }
    return status;
  }

  // Writes the counts of this agent for machine 0, which may be a newcomer.
  absl::Status TellCounts(const Meeting& meeting) {
    // With the name of the launch, because machine 0 may be new in the job.
    const std::string value = CountedToValue({meeting.attempt, meeting.counted, launch_});
    return agents_
        .Call(agents_.Put(agents_.CountKey(node_rank_), value), options_.outage_tolerance + kAgree,
              Until::kCancelled)
        .status();
  }

  // The name of the launch, which the first machine 0 chooses.
  const std::string& Launch() {
    if (launch_.empty()) launch_ = absl::StrCat(RandomId());
    return launch_;
  }

  // Takes over the largest counts of all machines.
  absl::Status TakeCounts(Meeting* meeting) {
    const absl::Duration patience =
        elastic() ? std::min(options_.outage_tolerance + kAgree, kLongest) : kAgree;
    const absl::Time deadline = Clock::Real().Now() + patience;
    for (int first = 1; first < num_nodes_; first += kCountsAtATime) {
      const int end = std::min(num_nodes_, first + kCountsAtATime);
      // All machines write at about the same time, so the existing keys come at once.
      const absl::Duration left = std::max(deadline - Clock::Real().Now(), kShortCall);
      MUSTER_ASSIGN_OR_RETURN(const bool all_count, TakeCounts(first, end, left, meeting));
      if (!all_count) break;
    }
    return absl::OkStatus();
  }
  // Takes the counts of the machines from `first` to before `end`. Returns false if not all of them
  // count.
  absl::StatusOr<bool> TakeCounts(int first, int end, absl::Duration patience, Meeting* meeting) {
    std::vector<std::string> keys;
    for (int rank = first; rank < end; ++rank) keys.push_back(agents_.CountKey(rank));
    const absl::StatusOr<v1::OpResult> result = agents_.Call(
        agents_.Wait(keys, patience),
        std::min(patience + kShortCall + options_.outage_tolerance, kLongest), Until::kCancelled);
    if (!elastic() && rpc::GetReason(result.status()) == v1::ERROR_REASON_WAIT_TIMEOUT) {
      MUSTER_LOG(Warning) << "not all machines of job " << options_.job
                          << " say how many restarts they have counted: an older version runs "
                          << "there, which counts its own";
      // Machines that do not learn of that end start, and would wait for this one.
      meeting->counted.last = {};
      return false;
    }
    MUSTER_RETURN_IF_ERROR(result.status());
    for (const v1::KeyValue& kv : result->wait().kvs()) {
      const std::optional<CountedValue> theirs = CountedFromValue(kv.value());
      if (!theirs.has_value()) return absl::InternalError("the counts of a machine are malformed");
      meeting->attempt = std::max(meeting->attempt, theirs->attempt);
      meeting->counted.TakeLarger(theirs->counted);
      if (launch_.empty()) launch_ = theirs->launch;
    }
    return true;
  }

  // Machine 0 writes what must be the same everywhere, the others compare.
  absl::Status Agree(Meeting* meeting) {
    if (node_rank_ == 0) {
      if (agrees_on_counts()) MUSTER_RETURN_IF_ERROR(TakeCounts(meeting));
    } else if (tells_counts()) {
      MUSTER_RETURN_IF_ERROR(TellCounts(*meeting));
    }
    if (node_rank_ == 0) {
      MUSTER_ASSIGN_OR_RETURN(meeting->master_port, FindFreePort());
      meeting->master_addr = options_.host;
      meeting->launch = Launch();
      const std::string value = SettingsToValue({.settings = options_.settings,
                                                 .debug = options_.debug,
                                                 .master_addr = meeting->master_addr,
                                                 .master_port = meeting->master_port,
                                                 .launch = meeting->launch,
                                                 .attempt = meeting->attempt,
                                                 .counted = meeting->counted},
                                                /*with_counts=*/agrees_on_counts());
      return agents_
          .Call(agents_.Put(agents_.SettingsKey(), value), options_.outage_tolerance + kAgree,
                Until::kCancelled)
          .status();
    }
    const absl::Duration patience = std::min(options_.outage_tolerance + kAgree, kLongest);
    MUSTER_ASSIGN_OR_RETURN(const v1::OpResult result,
                            agents_.Call(agents_.Wait({agents_.SettingsKey()}, patience),
                                         patience + kShortCall, Until::kCancelled));
    const v1::WaitReply& reply = result.wait();
    const std::optional<SettingsValue> theirs =
        reply.kvs_size() == 1 ? SettingsFromValue(reply.kvs(0).value()) : std::nullopt;
    if (!theirs.has_value()) {
      return absl::InternalError("the settings from machine 0 are malformed");
    }
    MUSTER_RETURN_IF_ERROR(CompareWith(*theirs, absl::StrCat("machine ", node_rank_)));
    if (agrees_on_counts()) {
      meeting->attempt = std::max(meeting->attempt, theirs->attempt);
      meeting->counted.TakeLarger(theirs->counted);
      // Machine 0 decides: machines that do not learn of that end from it start, and would wait for
      // this one.
      meeting->counted.last = theirs->counted.last;
    }
    meeting->launch = launch_ = theirs->launch;
    meeting->master_addr = theirs->master_addr;
    meeting->master_port = theirs->master_port;
    if (meeting->master_port < 1 || meeting->master_port > 65535) {
      return absl::InternalError("the master_port from machine 0 is not a port");
    }
    return absl::OkStatus();
  }

  void StopWatching() {
    session_->SetListener({});
    if (grow_timer_ != nullptr) {
      attempt_->Interrupt();  // makes its calls return
      grow_timer_.reset();
    }
    if (end_watch_ != nullptr) end_watch_->Stop();
    attempt_->ForgetListener();
  }

  // Constant after construction.
  const GrpcJobCoordinationOptions options_;
  NodeUplink* const session_;
  const std::string hostname_;

  // Late answers and directives share it.
  const std::shared_ptr<AttemptState> attempt_ = std::make_shared<AttemptState>();
  AgentsJob agents_;

  // Written by Join, before the watch starts.
  int node_rank_ = -1;
  int num_nodes_ = 1;
  std::optional<std::string> finished_before_;  // the first result of Finished()
  std::string launch_;                          // of this launch, once it is known
  std::optional<AttemptEnd> reported_end_;      // what Fail has returned for the watched attempt

  // For the machine that hosts the coordinator, while it has no place: how its last wait for one
  // ended, if it now asks for one although other machines run; and whether it has logged why it
  // stays.
  std::optional<absl::Status> asks_itself_;
  bool logged_serving_ = false;

  // Used by grow_timer_'s thread, or while that thread does not exist.
  Newcomers newcomers_;
  absl::Time grow_from_ = absl::InfinitePast();

  std::unique_ptr<EndWatch> end_watch_;  // null: a job of one machine
  // On machine 0, while an attempt is watched that has fewer machines than it may have.
  std::unique_ptr<TimerThread> grow_timer_;
};

}  // namespace

std::unique_ptr<JobCoordination> MakeGrpcJobCoordination(const GrpcJobCoordinationOptions& options,
                                                         NodeUplink* session) {
  return std::make_unique<GrpcJobCoordination>(options, session);
}

}  // namespace muster::agent
