#include "agent/session_client.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "rpc/address.h"
#include "rpc/session/agent_session.h"
#include "rpc/session/duration.h"
#include "rpc/status.h"
#include "rpc/utf8_check.h"

namespace muster::agent {
namespace {

constexpr uint32_t kProtocol = 1;
constexpr uint64_t kFramesBetweenAcks = 32;
// Queued, or sent and not acknowledged.
constexpr size_t kMaxStacks = 256;
constexpr size_t kUnacknowledgedFrames = 1 << 16;
constexpr absl::Duration kLongestRetryAfter = absl::Minutes(1);
constexpr size_t kSeenJobs = 1024;
// Per job; a coordinator takes as many.
constexpr size_t kSeenBarriers = 1 << 16;
constexpr int kBarriersInRecall = 1000;
// An agent with less tolerance does not follow hubs, because a hub that fails is a short outage.
constexpr absl::Duration kToleranceForHubs = absl::Seconds(10);

v1::OpResult ErrorResult(uint64_t op_id, const absl::Status& status) {
  v1::OpResult result;
  result.set_op_id(op_id);
  *result.mutable_error() = rpc::ToOpError(status);
  return result;
}

// Whether the coordinator recognises a second copy of `op`, even after a restart.
bool RepeatSafe(const v1::Op& op) {
  const auto named = [](const v1::Fence& fence) {
    return fence.request_id() != 0 && !fence.worker_id().empty();
  };
  switch (op.kind_case()) {
    case v1::Op::kTxn:
      return named(op.txn().fence()) || OnlyReads(op.txn());
    case v1::Op::kLeave:
      return named(op.leave().fence());
    case v1::Op::kEndGeneration:
      return named(op.end_generation().fence());
    case v1::Op::kCancelBarrier:
      return named(op.cancel_barrier().fence());
    case v1::Op::kRaiseTrigger:
      return named(op.raise_trigger().fence());
    case v1::Op::kQuarantine:
      return named(op.quarantine().fence());
    case v1::Op::kBeginCheckpoint:
      return named(op.begin_checkpoint().fence());
    default:
      return true;
  }
}

v1::BarrierState StateOf(const v1::OpResult& result) {
  if (result.has_arrive()) return result.arrive().report().state();
  return rpc::BarrierVerdict(result.error().detail().reason());
}

// Whether `result` is an answer to an operation like `op`: both have the same field numbers, except
// that an arrival of many is answered like one of one.
bool Answers(const v1::OpResult& result, const v1::Op& op) {
  if (result.has_error()) return true;
  const int wanted = op.has_arrive_many() ? static_cast<int>(v1::Op::kArrive) : op.kind_case();
  return result.kind_case() == wanted;
}

// For operations with a timeout: how long the caller had waited when it called, and (below) how
// long it has waited now.
absl::Duration WaitedBefore(const v1::Op& op) {
  const google::protobuf::Duration& waited = op.has_arrive_many()   ? op.arrive_many().waited()
                                             : op.has_arrive()      ? op.arrive().waited()
                                             : op.has_join()        ? op.join().waited()
                                             : op.has_agree_alive() ? op.agree_alive().waited()
                                                                    : op.wait().waited();
  return std::max(absl::ZeroDuration(), rpc::FromProto(waited));
}
void SetWaited(absl::Duration waited, v1::Op* op) {
  switch (op->kind_case()) {
    case v1::Op::kArrive:
      *op->mutable_arrive()->mutable_waited() = rpc::ToProto(waited);
      break;
    case v1::Op::kArriveMany:
      *op->mutable_arrive_many()->mutable_waited() = rpc::ToProto(waited);
      break;
    case v1::Op::kJoin:
      *op->mutable_join()->mutable_waited() = rpc::ToProto(waited);
      break;
    case v1::Op::kAgreeAlive:
      *op->mutable_agree_alive()->mutable_waited() = rpc::ToProto(waited);
      break;
    case v1::Op::kWait:
      *op->mutable_wait()->mutable_waited() = rpc::ToProto(waited);
      break;
    default:
      break;
  }
}

absl::Duration RetryAfter(const v1::Goodbye& goodbye) {
  return std::clamp(rpc::FromProto(goodbye.retry_after()), absl::ZeroDuration(),
                    kLongestRetryAfter);
}

// An error simulates a stream that breaks with this frame in flight.
absl::Status FailAtFrame() {
  MUSTER_FAILPOINT_STATUS("agent.frame");
  return absl::OkStatus();
}

absl::Status FailAtReceived() {
  MUSTER_FAILPOINT_STATUS("agent.received");
  return absl::OkStatus();
}

// Whether the same call would be refused again.
bool IsRefusal(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kPermissionDenied:
      return true;
    default:
      return false;
  }
}

}  // namespace

struct SessionClient::Todo {
  std::shared_ptr<OutgoingStream> close;
  std::shared_ptr<OutgoingStream> write;
  v1::AgentFrame frame;
  std::optional<std::pair<uint64_t, bool>> connected;
  bool upstream = false;
  std::vector<std::pair<Done, v1::OpResult>> results;
  std::vector<v1::Directive> directives;
  std::optional<v1::Beat> unsent;
  absl::Status lost;
  bool reconnect = false;
  bool wake = false;
};

// The object through which events of streams, which may outlive the client, reach it.
class SessionClient::Guard {
 public:
  explicit Guard(SessionClient* stream) : stream_(stream) {}
  // Returns null once the client is gone; else call Leave afterwards.
  SessionClient* Enter() {
    MutexLock lock(&mu_);
    if (stream_ != nullptr) ++inside_;
    return stream_;
  }
  void Leave() {
    MutexLock lock(&mu_);
    if (--inside_ == 0) changed_.SignalAll();
  }
  void Close() {
    MutexLock lock(&mu_);
    stream_ = nullptr;
    while (inside_ > 0) changed_.Wait(&mu_);
  }

 private:
  Mutex mu_;
  CondVar changed_;
  SessionClient* stream_ ABSL_GUARDED_BY(mu_);
  int inside_ ABSL_GUARDED_BY(mu_) = 0;
};

class SessionClient::Attempt final : public OutgoingStreamEvents {
 public:
  explicit Attempt(std::shared_ptr<Guard> guard) : guard_(std::move(guard)) {}
  void OnWritten() override {
    With([this](SessionClient* stream) { stream->OnWritten(this); });
  }
  void OnFrame(const v1::CoordinatorFrame& frame) override {
    With([&](SessionClient* stream) { stream->OnFrame(this, frame); });
  }
  void OnClosed(const absl::Status& status) override {
    With([&](SessionClient* stream) { stream->OnClosed(this, status); });
  }

 private:
  template <typename F>
  void With(F f) {
    SessionClient* const stream = guard_->Enter();
    if (stream == nullptr) return;
    f(stream);
    guard_->Leave();
  }
  const std::shared_ptr<Guard> guard_;
};

SessionClient::SessionClient(Options options, StreamOpener* transport)
    : options_(std::move(options)),
      transport_(transport),
      guard_(std::make_shared<Guard>(this)),
      backoff_(options_.first_backoff),
      max_backoff_(options_.last_backoff),
      beat_period_(options_.beat_period),
      lease_(kDefaultLease),
      random_(static_cast<uint32_t>(options_.incarnation ^ (options_.incarnation >> 32))) {}

SessionClient::~SessionClient() {
  guard_->Close();
  std::shared_ptr<OutgoingStream> link;
  {
    MutexLock lock(&mu_);
    link = std::move(link_);
  }
  if (link != nullptr) link->Close();
}

uint64_t SessionClient::Submit(v1::Op op, Done done) {
  Todo todo;
  uint64_t op_id = 0;
  // The coordinator could not parse its frame, and would get it again forever.
  const absl::Status sound = rpc::CheckUtf8(op);
  absl::Status refused;
  {
    MutexLock lock(&mu_);
    op_id = next_op_++;
    op.set_op_id(op_id);
    const size_t bytes = op.ByteSizeLong();
    if (!sound.ok()) {
      refused = sound;
    } else if (!lost_.ok()) {
      refused = lost_;
    } else if (bytes > options_.max_op_bytes) {
      refused = rpc::ErrorWithReason(
          absl::StatusCode::kInvalidArgument,
          absl::StrCat("the request has ", bytes, " bytes: at most ", options_.max_op_bytes,
                       " go through the agent; facts belong here, tensors and files do not"),
          v1::ERROR_REASON_LIMIT);
    } else if (held_.size() >= options_.max_held_ops ||
               held_bytes_ + bytes > options_.max_held_bytes) {
      refused = rpc::ErrorWithReason(
          absl::StatusCode::kUnavailable,
          absl::StrCat("the agent holds ", held_.size(), " requests of ", held_bytes_,
                       " bytes that the coordinator at ", options_.address,
                       " has not answered yet: try again later"),
          v1::ERROR_REASON_OVERLOADED, /*retryable=*/true);
    } else {
      held_bytes_ += bytes;
      const absl::Time since = options_.clock->Now() - WaitedBefore(op);
      held_.emplace(op_id, Held{std::move(op), std::move(done), bytes, since});
      queue_.push_back(op_id);
      Pump(&todo);
    }
  }
  if (!refused.ok() && done) done(ErrorResult(op_id, refused));
  Run(std::move(todo));
  return op_id;
}

void SessionClient::Forget(uint64_t op_id) {
  Done dropped;  // destroyed outside of the lock
  Todo todo;
  {
    MutexLock lock(&mu_);
    const auto it = held_.find(op_id);
    if (it == held_.end()) return;
    dropped = std::move(it->second.done);
    held_bytes_ -= it->second.bytes;
    held_.erase(it);
    if (held_.empty()) changed_.SignalAll();
    // While nothing can be sent, forgotten operations would pile up.
    if (queue_.size() > 2 * (held_.size() + stacks_) + 64) {
      const auto gone = [this](const Item& item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        const auto* const id = std::get_if<uint64_t>(&item);
        return id != nullptr && held_.count(*id) == 0;
      };
      queue_.erase(std::remove_if(queue_.begin(), queue_.end(), gone), queue_.end());
    }
    if (after_seats_.has_value() && !HoldsSentJoin()) {
      MoveAfterSeats(&todo);
      Pump(&todo);
    }
    if (waited_for_.erase(op_id) > 0) Pump(&todo);
  }
  Run(std::move(todo));
}

void SessionClient::SendStack(v1::StackReply reply) {
  if (const absl::Status sound = rpc::CheckUtf8(reply); !sound.ok()) {
    MUSTER_LOG(Error) << "a stack is not sent: " << sound.message();
    return;
  }
  Todo todo;
  {
    MutexLock lock(&mu_);
    if (stacks_ >= kMaxStacks || !lost_.ok()) return;
    queue_.push_back(std::move(reply));
    ++stacks_;
    Pump(&todo);
  }
  Run(std::move(todo));
}

void SessionClient::OfferHub(std::string address) {
  MutexLock lock(&mu_);
  hub_address_ = std::move(address);
}

void SessionClient::SetBeatPeriod(absl::Duration period) {
  Todo todo;
  {
    MutexLock lock(&mu_);
    beat_period_ = period;
    if (state_ == State::kOpen) {
      next_beat_ = std::min(next_beat_, options_.clock->Now() + period);
      todo.wake = true;
    }
  }
  Run(std::move(todo));
}

absl::Time SessionClient::Tick() {
  const absl::Time now = options_.clock->Now();
  {
    Todo todo;
    {
      MutexLock lock(&mu_);
      CheckStream(now, &todo);
    }
    Run(std::move(todo));
  }
  Todo todo;
  std::shared_ptr<Attempt> opening;
  std::string hub;
  bool beat_due = false;
  bool wants_answer = false;
  std::optional<v1::Beat> unsent;
  {
    MutexLock lock(&mu_);
    if (away_since_ + options_.outage_tolerance <= now && lost_.ok()) {
      FailAll(absl::UnavailableError(absl::StrCat(
                  "the coordinator at ", options_.address, " has been away for ",
                  absl::FormatDuration(absl::Trunc(now - away_since_, absl::Milliseconds(100))),
                  ", longer than the ", absl::FormatDuration(options_.outage_tolerance),
                  " that are tolerated: check whether it is running, and the network to it",
                  last_error_.empty() ? "" : absl::StrCat(" (", last_error_, ")"))),
              &todo);
    }
    if (state_ == State::kIdle && !refused_ && !ended_ && bye_ != Bye::kSent &&
        next_attempt_ <= now) {
      opening = attempt_ = std::make_shared<Attempt>(guard_);
      state_ = State::kOpening;
      hello_due_ = true;
      writing_ = false;
      if (at_hub_) hub = hub_->address;
      if (hub_.has_value()) open_by_ = now + Patience(3);
    }
    if (state_ == State::kOpen && next_beat_ <= now) {
      beat_due = true;
      unsent = std::exchange(beat_, std::nullopt);
      next_beat_ = now + beat_period_;
      // Others depend on a hub: it must not be the last to notice that its own stream is dead.
      wants_answer = at_hub_ || (coordinator_answers_ && options_.is_hub && options_.is_hub());
      if (wants_answer) answer_by_ = std::min(answer_by_, now + Patience(4));
    }
  }
  if (opening != nullptr) {
    absl::StatusOr<std::shared_ptr<OutgoingStream>> link = transport_->Open(hub, opening);
    if (!link.ok()) {
      OnClosed(opening.get(), link.status());
    } else {
      MutexLock lock(&mu_);
      if (attempt_ == opening) {
        link_ = *std::move(link);
        Pump(&todo);
      } else {  // it was dropped before its id was known
        todo.close = *std::move(link);
      }
    }
  }
  if (unsent.has_value() && options_.on_unsent_beat) options_.on_unsent_beat(*unsent);
  if (beat_due) {
    v1::Beat beat;
    if (options_.beat) beat = options_.beat();
    if (wants_answer) beat.set_wants_answer(true);
    MutexLock lock(&mu_);
    if (state_ == State::kOpen) {
      beat_ = std::move(beat);
      Pump(&todo);
    } else {
      todo.unsent = std::move(beat);
    }
  }
  Run(std::move(todo));
  MutexLock lock(&mu_);
  return NextDeadline();
}

absl::Time SessionClient::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  if (state_ == State::kIdle && !refused_ && !ended_ && bye_ != Bye::kSent) next = next_attempt_;
  if (state_ == State::kOpen) next = std::min(next_beat_, seats_by_);
  if (lost_.ok()) next = std::min(next, away_since_ + options_.outage_tolerance);
  return std::min({next, open_by_, answer_by_, leave_by_, doubt_until_, move_by_});
}

absl::Duration SessionClient::Patience(int part) const {
  return std::max(lease_ / part, options_.first_backoff);
}

void SessionClient::CheckStream(absl::Time now, Todo* todo) {
  if (state_ == State::kOpening && open_by_ <= now) {
    NoteError("it has not welcomed this agent in time");
    Drop(todo);
  } else if (answer_by_ <= now) {
    NoteError("it has not acknowledged a beat in time");
    left_ = Left::kFailed;
    todo->reconnect = !at_hub_;
    Drop(todo);
  } else if (leave_by_ <= now) {
    left_ = Left::kAway;
    Drop(todo);
  } else if (move_by_ <= now) {
    if (leaving_) {
      Drop(todo);
    } else {
      waited_for_.clear();
      move_by_ = now + options_.move_patience;
      Pump(todo);
    }
  } else if (doubt_until_ <= now) {
    Back();
  } else if (state_ == State::kOpen && seats_by_ <= now) {
    MoveAfterSeats(todo);
    Pump(todo);
  }
}

void SessionClient::OnWritten(const Attempt* attempt) {
  Todo todo;
  {
    MutexLock lock(&mu_);
    if (attempt != attempt_.get()) return;
    writing_ = false;
    if (bye_ == Bye::kWriting) bye_ = Bye::kSent;
    Pump(&todo);
  }
  Run(std::move(todo));
}

void SessionClient::OnFrame(const Attempt* attempt, const v1::CoordinatorFrame& frame) {
  Todo todo;
  {
    MutexLock lock(&mu_);
    if (attempt != attempt_.get()) return;
    // A hub's own state does not show that it has received this agent's frames.
    if (!frame.has_hub_state()) answer_by_ = absl::InfiniteFuture();
    if (frame.has_welcome() && state_ == State::kOpening) {
      Welcomed(frame.welcome(), &todo);
    } else if (state_ == State::kOpen) {
      Received(frame, &todo);
    } else if (frame.has_goodbye()) {
      TakeGoodbye(frame.goodbye(), &todo);
    } else {
      NoteError("it did not begin with a welcome");
      Drop(&todo);
    }
    Pump(&todo);
  }
  Run(std::move(todo));
}

void SessionClient::OnClosed(const Attempt* attempt, const absl::Status& status) {
  Todo todo;
  {
    MutexLock lock(&mu_);
    if (attempt != attempt_.get()) return;
    if (!status.ok()) NoteError(std::string(status.message()));
    Drop(&todo);
    if (!ever_connected_ && IsRefusal(status)) {
      refused_ = true;
      absl::Status why(status.code(), absl::StrCat("the coordinator at ", options_.address,
                                                   " refuses this agent: ", status.message()));
      FailAll(why, &todo);
    }
  }
  Run(std::move(todo));
}

void SessionClient::Drop(Todo* todo) {
  const absl::Time now = options_.clock->Now();
  const bool open = state_ == State::kOpen;
  const bool lasted = now - opened_ >= max_backoff_;
  // A move is no outage.
  if (ever_connected_ && !leaving_) away_since_ = std::min(away_since_, AwayFrom(now));
  // The stream has been stable: it did not break right after the coordinator accepted the agents.
  if (lasted) backoff_ = options_.first_backoff;
  if (moving_to_.has_value()) {
    hub_ = *std::move(moving_to_);
    moving_to_.reset();
    at_hub_ = true;
    in_turn_ = false;
    hub_breaks_ = 0;
    next_attempt_ = now + retry_after_;
  } else {
    ChooseNext(open, lasted);
    const double share =
        options_.random ? options_.random() : std::uniform_real_distribution<double>(0, 1)(random_);
    next_attempt_ = now + std::max(backoff_ * share, retry_after_);
    backoff_ = std::min(backoff_ * 2, max_backoff_);
  }
  retry_after_ = absl::ZeroDuration();
  todo->close = std::move(link_);
  link_ = nullptr;
  attempt_ = nullptr;
  state_ = State::kIdle;
  writing_ = false;
  todo->unsent = std::exchange(beat_, std::nullopt);
  // All callers have failed: only recalls are left, and the next session gets new ones.
  if (!lost_.ok()) Clear();
  opened_ = open_by_ = answer_by_ = leave_by_ = doubt_until_ = move_by_ = absl::InfiniteFuture();
  hub_away_ = leaving_ = false;
  left_ = Left::kNo;
  waited_for_.clear();
  todo->upstream |= open;
  todo->wake = true;
  changed_.SignalAll();
}

void SessionClient::ChooseNext(bool open, bool lasted) {
  if (!hub_.has_value()) return;
  if (!at_hub_) {  // neither answers: in turn
    at_hub_ = in_turn_ = true;
    // The hub was right about the coordinator.
    away_hub_.clear();
    return;
  }
  if (left_ == Left::kEnds) {
    at_hub_ = false;
    hub_.reset();
    return;
  }
  // A hub whose own session is new ends the streams of its agents; one that is gone does not accept
  // them again.
  if (lasted) hub_breaks_ = 0;
  if (open && left_ == Left::kNo && ++hub_breaks_ == 1) return;
  at_hub_ = false;
  if (!std::exchange(logged_left_, true)) {
    MUSTER_LOG(Warning) << "this node returns to the coordinator at " << options_.address << ": "
                        << last_error_;
  }
  // What happened to the hub while the coordinator was away is not reported.
  if (in_turn_) return;
  if (left_ == Left::kAway && std::exchange(away_hub_, hub_->node) != hub_->node) {
    // Most likely the coordinator was restarted: its hubs are not to blame. If it is there and
    // names this hub again, the connection between the two is.
    return;
  }
  failed_hub_ = hub_->node;
}

void SessionClient::Back() {
  away_since_ = doubt_until_ = absl::InfiniteFuture();
  lost_ = absl::OkStatus();
  last_error_.clear();
  logged_left_ = false;
}

absl::Time SessionClient::AwayFrom(absl::Time now) const {
  return doubt_until_ == absl::InfiniteFuture() ? now : std::min(away_before_, now);
}

void SessionClient::NoteError(absl::string_view what) {
  // gRPC passes on any bytes, and a hub forwards this text to its agents.
  last_error_ =
      OneLine(at_hub_ ? absl::StrCat("hub ", hub_->node, " at ", hub_->address, ": ", what)
                      : std::string(what));
}

void SessionClient::UseHub(const v1::UseHub& use, bool wait_for_seats, Todo* todo) {
  // Only the coordinator moves agents, not a hub, and an agent that ends does not move.
  if (at_hub_ || leaving_ || bye_ != Bye::kNo) return;
  // The coordinator may not know yet that this agent is a hub: a restarted one learns it from the
  // next beat.
  if (options_.is_hub && options_.is_hub()) return;
  const absl::StatusOr<rpc::Address> address = rpc::ParseAddress(use.address());
  if (!address.ok() || (!address->is_unix() && address->port == 0) || use.node().empty() ||
      use.node() == options_.node || use.address() == hub_address_) {
    MUSTER_LOG(Warning) << "the coordinator at " << options_.address << " names hub '" << use.node()
                        << "' at '" << use.address()
                        << "', which this agent cannot use: check that its --hub_listen is an "
                           "address that other machines can reach";
    failed_hub_ = use.node();
    moving_to_.reset();
    NoteError("it named a hub that cannot be used");
    Drop(todo);
    return;
  }
  MUSTER_LOG(Info) << "this node uses hub " << use.node() << " at " << use.address() << ": "
                   << use.why();
  if (!moving_to_.has_value()) {
    if (wait_for_seats && HoldsSentJoin()) {
      after_seats_ = use;
      seats_by_ = std::min(seats_by_, options_.clock->Now() + options_.seat_patience);
      todo->wake = true;
      return;
    }
    move_by_ = options_.clock->Now() + options_.move_patience;
    for (const auto& [op_id, held] : held_) {
      if (held.sent && !held.again && !RepeatSafe(held.op)) waited_for_.insert(op_id);
    }
  }
  moving_to_ = Hub{use.node(), use.address()};
  todo->wake = true;
}

void SessionClient::MoveAfterSeats(Todo* todo) {
  seats_by_ = absl::InfiniteFuture();
  UseHub(*std::exchange(after_seats_, std::nullopt), /*wait_for_seats=*/false, todo);
}

bool SessionClient::HoldsSentJoin() const {
  return std::any_of(held_.begin(), held_.end(), [](const auto& entry) {
    return entry.second.sent && entry.second.op.has_join();
  });
}

void SessionClient::TakeHubState(const v1::HubState& state, Todo* todo) {
  if (!at_hub_) return;
  const absl::Time now = options_.clock->Now();
  if (state.coordinator_away()) {
    if (hub_away_) return;
    NoteError(state.why());
    away_since_ = AwayFrom(now);
    doubt_until_ = absl::InfiniteFuture();
    leave_by_ = now + Patience(3);
    hub_away_ = true;
  } else {
    Back();
    away_hub_.clear();
    leave_by_ = absl::InfiniteFuture();
    if (!std::exchange(hub_away_, false)) return;
    todo->connected = {term_, /*resumed=*/true};
  }
  todo->upstream = true;
  todo->wake = true;
}

void SessionClient::TakeGoodbye(const v1::Goodbye& goodbye, Todo* todo) {
  NoteError(goodbye.reason());
  retry_after_ = RetryAfter(goodbye);
  if (goodbye.final()) {
    ended_ = true;
    todo->upstream = true;
    FailAll(
        absl::UnavailableError(absl::StrCat("the launch that held the coordinator at ",
                                            options_.address, " has ended: ", goodbye.reason())),
        todo);
    return;
  }
  if (at_hub_ && !goodbye.has_retry_after()) left_ = Left::kEnds;
}

void SessionClient::FailAll(const absl::Status& status, Todo* todo) {
  lost_ = status;
  todo->lost = status;
  for (auto& [op_id, held] : held_) {
    if (held.done) todo->results.emplace_back(std::move(held.done), ErrorResult(op_id, status));
  }
  Clear();
}

void SessionClient::Clear() {
  held_.clear();
  held_bytes_ = 0;
  queue_.clear();
  stacks_ = 0;
  unacked_.clear();
  waited_for_.clear();
  changed_.SignalAll();
}

std::string SessionClient::WhyRefused(const v1::Welcome& welcome) const {
  // Terms of another cluster cannot be compared.
  if (welcome.cluster_id() == cluster_id_ && welcome.term() < term_) {
    return absl::StrCat("term ", term_, " has begun, but it serves term ", welcome.term(),
                        ": an older coordinator, or one on an older copy of its data "
                        "directory (muster-coordinator --restored)");
  }
  if (at_hub_ && welcome.cluster_id() != cluster_id_) {
    return absl::StrCat("it is in cluster ", welcome.cluster_id(), ", this agent in ", cluster_id_);
  }
  if (welcome.protocol() != kProtocol) {
    return absl::StrCat("it speaks protocol ", welcome.protocol(), ", but was offered only ",
                        kProtocol);
  }
  return "";
}

void SessionClient::Acknowledged(uint64_t seq) {
  while (!unacked_.empty() && unacked_.front().seq <= seq) {
    for (const Item& item : unacked_.front().items) {
      if (std::holds_alternative<v1::StackReply>(item)) --stacks_;
    }
    unacked_.pop_front();
  }
}

void SessionClient::Resume(uint64_t last_received_seq) {
  Acknowledged(last_received_seq);
  // The server has not received these: their contents are sent again, first.
  for (auto sent = unacked_.rbegin(); sent != unacked_.rend(); ++sent) {
    for (auto item = sent->items.rbegin(); item != sent->items.rend(); ++item) {
      queue_.push_front(std::move(*item));
    }
  }
  for (auto& [op_id, held] : held_) {
    if (!std::exchange(held.again, false)) continue;
    queue_.push_back(op_id);
  }
}

void SessionClient::BeginSession(Todo* todo) {
  after_seats_.reset();
  seats_by_ = absl::InfiniteFuture();
  received_ = 0;
  queue_.clear();
  stacks_ = 0;
  for (auto it = held_.begin(); it != held_.end();) {
    Held& held = it->second;
    if (held.op.has_recall_barriers() && !held.done) {  // made again below
      held_bytes_ -= held.bytes;
      it = held_.erase(it);
      continue;
    }
    if (held.sent && !RepeatSafe(held.op)) {
      if (held.done) {
        todo->results.emplace_back(
            std::move(held.done),
            ErrorResult(it->first, absl::UnavailableError(absl::StrCat(
                                       "the connection to the coordinator at ", options_.address,
                                       " broke: whether the request took effect is unknown"))));
      }
      held_bytes_ -= held.bytes;
      it = held_.erase(it);
      continue;
    }
    held.again = false;
    // A restarted coordinator, or one to which the agent comes through a hub, continues with the
    // rest of the timeout.
    held_bytes_ -= held.bytes;
    SetWaited(options_.clock->Now() - held.since, &held.op);
    held.bytes = held.op.ByteSizeLong();
    held_bytes_ += held.bytes;
    queue_.push_back(it->first);
    ++it;
  }
  // Also for another session of the same term: the earlier message may have been lost.
  QueueRecalls();
}

void SessionClient::Welcomed(const v1::Welcome& welcome, Todo* todo) {
  if (const std::string why = WhyRefused(welcome); !why.empty()) {
    NoteError(why);
    Drop(todo);
    return;
  }
  if (!cluster_id_.empty() && cluster_id_ != welcome.cluster_id()) {
    MUSTER_LOG(Warning) << "the coordinator at " << options_.address
                        << " is another one than before (cluster " << welcome.cluster_id()
                        << ", not " << cluster_id_ << "): it does not know this job";
  }
  MUSTER_FAILPOINT("agent.welcomed");
  const std::string hub = at_hub_ ? hub_->node : "";
  const bool resumed =
      ever_connected_ && hub == session_hub_ && welcome.session_id() == session_id_;
  if (resumed) {
    Resume(welcome.last_received_seq());
  } else {
    BeginSession(todo);
  }
  unacked_.clear();
  last_sent_ack_ = 0;
  next_seq_ = welcome.last_received_seq() + 1;
  session_id_ = welcome.session_id();
  session_hub_ = hub;
  if (!resumed) ++sessions_;
  cluster_id_ = welcome.cluster_id();
  term_ = welcome.term();
  state_ = State::kOpen;
  coordinator_answers_ = std::find(welcome.features().begin(), welcome.features().end(),
                                   rpc::kAnswersBeats) != welcome.features().end();
  ever_connected_ = true;
  opened_ = options_.clock->Now();
  open_by_ = absl::InfiniteFuture();
  failed_hub_.clear();
  in_turn_ = false;
  const absl::Duration lease = rpc::FromProto(welcome.lease());
  lease_ = lease > absl::ZeroDuration() ? lease : kDefaultLease;
  if (at_hub_) {
    away_before_ = away_since_;
    doubt_until_ = opened_ + Patience(4);
    if (lost_.ok()) away_since_ = absl::InfiniteFuture();
  } else {
    hub_.reset();
    Back();
  }
  max_backoff_ = options_.last_backoff;
  // A restarted coordinator gives every worker one lease to reconnect.
  if (lease > absl::ZeroDuration()) {
    max_backoff_ =
        std::clamp(lease / 3, std::min(options_.first_backoff, max_backoff_), max_backoff_);
  }
  next_beat_ = options_.clock->Now();
  todo->connected = {term_, resumed};
  todo->upstream = true;
  todo->wake = true;
  changed_.SignalAll();
}

void SessionClient::QueueRecalls() {
  std::vector<uint64_t> ids;
  for (const auto& [job_id, job] : seen_) {
    v1::RecallBarriersRequest* request = nullptr;
    for (const auto& [barrier_id, last] : job.barriers) {
      if (request == nullptr || request->seen_size() == kBarriersInRecall) {
        const uint64_t op_id = next_op_++;
        ids.push_back(op_id);
        v1::Op& op = held_[op_id].op;
        op.set_op_id(op_id);
        request = op.mutable_recall_barriers();
        request->mutable_fence()->set_job_id(job_id);
        request->mutable_fence()->set_generation(job.generation);
      }
      v1::SeenBarrier* const seen = request->add_seen();
      seen->set_barrier_id(barrier_id);
      seen->set_counter(last.first);
      seen->set_state(last.second);
    }
  }
  for (const uint64_t op_id : ids) {
    Held& held = held_[op_id];
    held.bytes = held.op.ByteSizeLong();
    held_bytes_ += held.bytes;
  }
  queue_.insert(queue_.begin(), ids.begin(), ids.end());
}

void SessionClient::NoteBarrier(const v1::Op& op, const v1::OpResult& result) {
  const v1::Fence& fence = op.has_arrive() ? op.arrive().fence() : op.arrive_many().fence();
  const v1::BarrierState state = StateOf(result);
  if (seen_.count(fence.job_id()) == 0 &&
      (state == v1::BARRIER_STATE_UNSPECIFIED || seen_.size() >= kSeenJobs)) {
    return;
  }
  SeenJob& job = seen_[fence.job_id()];
  if (fence.generation() < job.generation) return;
  if (fence.generation() > job.generation ||
      result.error().detail().reason() == v1::ERROR_REASON_GENERATION_ENDED) {
    job.barriers.clear();
    job.generation = fence.generation();
  }
  if (state == v1::BARRIER_STATE_UNSPECIFIED) return;
  const std::string& id =
      op.has_arrive() ? op.arrive().barrier_id() : op.arrive_many().barrier_id();
  const uint64_t counter = op.has_arrive() ? op.arrive().counter() : op.arrive_many().counter();
  const auto it = job.barriers.find(id);
  if (it != job.barriers.end()) {
    if (counter >= it->second.first) it->second = {counter, state};
  } else if (job.barriers.size() < kSeenBarriers) {
    job.barriers.emplace(id, std::make_pair(counter, state));
  }
}

void SessionClient::Received(const v1::CoordinatorFrame& frame, Todo* todo) {
  if (const absl::Status broken = FailAtReceived(); !broken.ok()) {
    NoteError(std::string(broken.message()));
    Drop(todo);
    return;
  }
  if (frame.seq() != 0) {
    if (frame.seq() <= received_) return;  // seen on an earlier stream
    if (frame.seq() != received_ + 1) {
      NoteError(absl::StrCat("its frame ", frame.seq(), " came after ", received_));
      Drop(todo);
      return;
    }
    received_ = frame.seq();
  }
  Acknowledged(frame.ack());
  if (unacked_.size() > kUnacknowledgedFrames) {
    NoteError(absl::StrCat("it has acknowledged none of ", unacked_.size(), " frames"));
    Drop(todo);
    return;
  }
  switch (frame.kind_case()) {
    case v1::CoordinatorFrame::kResults:
      for (const v1::OpResult& result : frame.results().results()) {
        const auto it = held_.find(result.op_id());
        if (it == held_.end()) continue;  // it was forgotten
        if (result.error().detail().reason() == v1::ERROR_REASON_STOPPING &&
            RepeatSafe(it->second.op)) {
          it->second.again = true;
          continue;
        }
        const bool answers = Answers(result, it->second.op);
        if (answers && (it->second.op.has_arrive() || it->second.op.has_arrive_many())) {
          NoteBarrier(it->second.op, result);
        }
        if (it->second.done) {
          todo->results.emplace_back(
              std::move(it->second.done),
              answers ? result
                      : ErrorResult(result.op_id(),
                                    absl::InternalError(absl::StrCat(
                                        "the coordinator at ", options_.address,
                                        " answered a request with a result of the wrong kind: "
                                        "check that both sides run the same version of Muster"))));
        }
        waited_for_.erase(it->first);
        held_bytes_ -= it->second.bytes;
        held_.erase(it);
      }
      if (held_.empty()) changed_.SignalAll();
      if (at_hub_) away_hub_.clear();
      if (after_seats_.has_value() && !HoldsSentJoin()) MoveAfterSeats(todo);
      break;
    case v1::CoordinatorFrame::kDirective:
      if (frame.directive().has_use_hub()) {
        UseHub(frame.directive().use_hub(), /*wait_for_seats=*/true, todo);
      } else {
        todo->directives.push_back(frame.directive());
      }
      break;
    case v1::CoordinatorFrame::kGoodbye:
      TakeGoodbye(frame.goodbye(), todo);
      break;
    case v1::CoordinatorFrame::kHubState:
      TakeHubState(frame.hub_state(), todo);
      break;
    case v1::CoordinatorFrame::kWelcome:
    case v1::CoordinatorFrame::KIND_NOT_SET:
      break;
  }
}

void SessionClient::Pump(Todo* todo) {
  if (link_ == nullptr || writing_) return;
  if (!NextFrame(&todo->frame)) return;
  if (todo->frame.has_ops()) {
    if (const absl::Status broken = FailAtFrame(); !broken.ok()) {
      NoteError(std::string(broken.message()));
      Drop(todo);
      return;
    }
  }
  writing_ = true;
  todo->write = link_;
}

bool SessionClient::NextFrame(v1::AgentFrame* frame) {
  if (hello_due_) {
    hello_due_ = false;
    MUSTER_FAILPOINT("agent.hello");
    v1::Hello& hello = *frame->mutable_hello();
    hello.set_protocol_min(kProtocol);
    hello.set_protocol_max(kProtocol);
    hello.set_node(options_.node);
    hello.set_agent_incarnation(options_.incarnation);
    hello.set_last_received_seq(received_);
    hello.set_session_id(session_id_);
    if (!at_hub_) {
      hello.set_hub_address(hub_address_);
      hello.set_failed_hub(failed_hub_);
    }
    if (options_.outage_tolerance >= kToleranceForHubs) hello.add_features("hub");
    hello.set_host(options_.host);
    hello.set_version(options_.version);
    hello.set_term_seen(term_);
    hello.set_cluster_id(cluster_id_);
    return true;
  }
  if (state_ != State::kOpen || bye_ == Bye::kSent || leaving_) return false;
  if (moving_to_.has_value() && waited_for_.empty()) {
    leaving_ = true;
    frame->mutable_bye()->set_reason(absl::StrCat("uses hub ", moving_to_->node));
  } else if (beat_.has_value()) {
    *frame->mutable_beat() = *std::move(beat_);
    beat_.reset();
  } else {
    Sent sent;
    size_t bytes = 0;
    // What is sent now could not be repeated after a move, or would wait in a hub that is away.
    while (!queue_.empty() && !moving_to_.has_value() && !hub_away_) {
      Item& item = queue_.front();
      if (auto* const stack = std::get_if<v1::StackReply>(&item)) {
        if (!sent.items.empty()) break;
        *frame->mutable_stack() = *stack;
        sent.items.push_back(std::move(item));
        queue_.pop_front();
        break;
      }
      const auto it = held_.find(std::get<uint64_t>(item));
      if (it == held_.end()) {
        queue_.pop_front();
        continue;
      }
      Held& held = it->second;
      if (!sent.items.empty() && bytes + held.bytes > options_.frame_bytes) break;
      bytes += held.bytes;
      held.sent = true;
      *frame->mutable_ops()->add_ops() = held.op;
      sent.items.push_back(std::move(item));
      queue_.pop_front();
    }
    if (!sent.items.empty()) {
      sent.seq = next_seq_++;
      frame->set_seq(sent.seq);
      unacked_.push_back(std::move(sent));
    } else if (bye_ == Bye::kDue) {
      bye_ = Bye::kWriting;
      frame->mutable_bye()->set_reason("the agent ends");
    } else if (received_ - last_sent_ack_ < kFramesBetweenAcks) {
      return false;
    }
  }
  frame->set_ack(received_);
  last_sent_ack_ = received_;
  return true;
}

void SessionClient::Run(Todo todo) {
  if (todo.close != nullptr) todo.close->Close();
  if (todo.reconnect) transport_->Reconnect();
  if (todo.unsent.has_value() && options_.on_unsent_beat) options_.on_unsent_beat(*todo.unsent);
  if (todo.connected.has_value() && options_.on_connected) {
    options_.on_connected(todo.connected->first, todo.connected->second);
  }
  if (todo.upstream && options_.on_upstream) options_.on_upstream();
  if (todo.write != nullptr) todo.write->Write(std::move(todo.frame));
  for (auto& [done, result] : todo.results) done(result);
  if (options_.on_directive) {
    for (const v1::Directive& directive : todo.directives) options_.on_directive(directive);
  }
  if (!todo.lost.ok() && options_.on_lost) options_.on_lost(todo.lost);
  if (todo.wake && options_.wake) options_.wake();
}

void SessionClient::Finish(absl::Time deadline) {
  Todo todo;
  {
    MutexLock lock(&mu_);
    while (!held_.empty() && lost_.ok()) {
      const absl::Duration left = deadline - Clock::Real().Now();
      if (left <= absl::ZeroDuration()) break;
      changed_.WaitWithTimeout(&mu_, left);
    }
    bye_ = Bye::kDue;
    if (!leaving_) {
      moving_to_.reset();
      waited_for_.clear();
      move_by_ = absl::InfiniteFuture();
    }
    Pump(&todo);
  }
  Run(std::move(todo));
  MutexLock lock(&mu_);
  // The coordinator closes a stream after Bye. A frame that is only written may still be in this
  // process, which may end now.
  while (state_ == State::kOpen) {
    const absl::Duration left = deadline - Clock::Real().Now();
    if (left <= absl::ZeroDuration()) break;
    changed_.WaitWithTimeout(&mu_, left);
  }
  bye_ = Bye::kSent;
}

bool SessionClient::connected() const {
  MutexLock lock(&mu_);
  return state_ == State::kOpen && !hub_away_;
}

bool SessionClient::ever_connected() const {
  MutexLock lock(&mu_);
  return ever_connected_;
}

absl::Status SessionClient::WaitUntilConnected(absl::Duration timeout) {
  const absl::Time deadline = Clock::Real().Now() + timeout;
  MutexLock lock(&mu_);
  while (!refused_ && !ended_ && !(ever_connected_ && lost_.ok())) {
    const absl::Duration left = deadline - Clock::Real().Now();
    if (left <= absl::ZeroDuration()) {
      if (!lost_.ok()) return lost_;
      return absl::UnavailableError(absl::StrCat("no coordinator answers at ", options_.address,
                                                 " within ", absl::FormatDuration(timeout),
                                                 ": is it running, and is the address right?"));
    }
    changed_.WaitWithTimeout(&mu_, left);
  }
  return lost_;
}

bool SessionClient::ended() const {
  MutexLock lock(&mu_);
  return ended_;
}

std::string SessionClient::last_error() const {
  MutexLock lock(&mu_);
  return last_error_;
}

absl::Status SessionClient::lost() const {
  MutexLock lock(&mu_);
  return lost_;
}

uint64_t SessionClient::term() const {
  MutexLock lock(&mu_);
  return term_;
}

Upstream SessionClient::upstream() const {
  MutexLock lock(&mu_);
  Upstream upstream;
  upstream.connected = state_ == State::kOpen && !hub_away_;
  upstream.session = sessions_;
  upstream.term = term_;
  upstream.cluster_id = cluster_id_;
  upstream.lease = lease_;
  upstream.hub = session_hub_;
  upstream.why_away = last_error_;
  upstream.ended = ended_;
  return upstream;
}

size_t SessionClient::held_ops() const {
  MutexLock lock(&mu_);
  return held_.size();
}

}  // namespace muster::agent
