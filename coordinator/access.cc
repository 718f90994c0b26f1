#include "coordinator/access.h"

#include <array>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/defaults.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// Who may do an operation, besides admins.
enum class Needs {
  kView,     // every person
  kSubmit,   // whoever may submit
  kOwner,    // the job's owner, and its attempt
  kAttempt,  // the attempt of the job
  kRead,     // every person, and the attempt of the job
  kNode,
  kAdmin,
};

Needs NeedsOf(v1::Op::KindCase kind) {
  switch (kind) {
    case v1::Op::kGetRankTable:
    case v1::Op::kDescribeBarrier:
    case v1::Op::kListBarriers:
    case v1::Op::kStragglerReport:
    case v1::Op::kGetMembers:
    case v1::Op::kResolveCheckpoint:
    case v1::Op::kListCheckpoints:
      return Needs::kRead;
    case v1::Op::kGetJob:
    case v1::Op::kListJobs:
    case v1::Op::kReadJobLog:
    case v1::Op::kListNodes:
      return Needs::kView;
    case v1::Op::kSubmitJob:
      return Needs::kSubmit;
    case v1::Op::kControlJob:
    case v1::Op::kRaiseTrigger:
    case v1::Op::kCancelBarrier:
    case v1::Op::kEndGeneration:
    case v1::Op::kMarkCheckpoint:
    case v1::Op::kCollectCheckpoints:
    case v1::Op::kCheckpointDeleted:
      return Needs::kOwner;
    case v1::Op::kJoin:
    case v1::Op::kLeave:
    case v1::Op::kArrive:
    case v1::Op::kArriveMany:
    case v1::Op::kRecallBarriers:
    case v1::Op::kTxn:
    case v1::Op::kWait:
    case v1::Op::kPollTriggers:
    case v1::Op::kHeartbeat:
    case v1::Op::kReportExit:
    case v1::Op::kAgreeAlive:
    case v1::Op::kBeginCheckpoint:
    case v1::Op::kReportShards:
    case v1::Op::kSealCheckpoint:
    case v1::Op::kPublishCheckpoint:
    case v1::Op::kAbortCheckpoint:
      return Needs::kAttempt;
    case v1::Op::kSyncNode:
    case v1::Op::kAnswerLog:
      return Needs::kNode;
    case v1::Op::kQuarantine:
    case v1::Op::kRemoveJob:
    case v1::Op::kControlNode:
    case v1::Op::KIND_NOT_SET:
      return Needs::kAdmin;
  }
  return Needs::kAdmin;
}

absl::string_view InWords(Needs needs) {
  switch (needs) {
    case Needs::kView:
    case Needs::kRead:
      return "role view, submit or admin";
    case Needs::kSubmit:
      return "role submit or admin";
    case Needs::kOwner:
      return "the owner of the job, or role admin";
    case Needs::kAttempt:
      return "the token of this attempt, or role admin";
    case Needs::kNode:
      return "role node or admin";
    case Needs::kAdmin:
      return "role admin";
  }
  return "role admin";
}

bool IsPerson(Role role) { return role == Role::kView || role == Role::kSubmit; }

v1::OpError Denied(const Identity& who, absl::string_view what, absl::string_view needs) {
  return MakeError(
      absl::StatusCode::kPermissionDenied, v1::ERROR_REASON_SCOPE,
      absl::StrCat(who.role == Role::kAttempt
                       ? absl::StrCat("the token of ", Quoted(who.group))
                       : absl::StrCat("user ", Quoted(who.name), " of role ", RoleName(who.role)),
                   " may not ", what, ": it needs ", needs));
}

// Where an operation names its job: `job_id`, or that of its `fence`.
struct JobField {
  const FieldDescriptor* kind = nullptr;
  const FieldDescriptor* fence = nullptr;
  const FieldDescriptor* job_id = nullptr;
};

constexpr int kKinds = 128;  // a test holds it against the proto

std::array<JobField, kKinds> FindJobFields() {
  std::array<JobField, kKinds> fields;
  const auto* const kinds = v1::Op::descriptor()->FindOneofByName("kind");
  for (int i = 0; i < kinds->field_count(); ++i) {
    const FieldDescriptor* const kind = kinds->field(i);
    JobField& field = fields.at(static_cast<size_t>(kind->number()));
    field.kind = kind;
    field.fence = kind->message_type()->FindFieldByName("fence");
    const auto* const of =
        field.fence != nullptr ? field.fence->message_type() : kind->message_type();
    field.job_id = of->FindFieldByName("job_id");
  }
  return fields;
}

}  // namespace

absl::string_view RoleName(Role role) {
  switch (role) {
    case Role::kView:
      return "view";
    case Role::kSubmit:
      return "submit";
    case Role::kNode:
      return "node";
    case Role::kAttempt:
      return "attempt";
    case Role::kAdmin:
      return "admin";
  }
  return "none";
}

std::optional<Role> ParseRole(absl::string_view name) {
  for (const Role role : {Role::kView, Role::kSubmit, Role::kNode, Role::kAdmin}) {
    if (RoleName(role) == name) return role;
  }
  return std::nullopt;
}

bool Covers(const Identity& attempt, absl::string_view job) {
  (void)absl::ConsumeSuffix(&job, kAgentsSuffix);
  return !attempt.group.empty() && job == attempt.group;
}

absl::string_view JobOf(const v1::Op& op) {
  static const std::array<JobField, kKinds>& fields =
      *new std::array<JobField, kKinds>(FindJobFields());
  const size_t number = static_cast<size_t>(op.kind_case());
  if (number >= fields.size() || fields[number].job_id == nullptr) return "";
  const JobField& field = fields[number];
  const Message* message = &op.GetReflection()->GetMessage(op, field.kind);
  if (field.fence != nullptr) {
    message = &message->GetReflection()->GetMessage(*message, field.fence);
  }
  std::string scratch;  // not used for a field that is a plain string
  return message->GetReflection()->GetStringReference(*message, field.job_id, &scratch);
}

void ForgetWorker(v1::Op* op) {
  const auto* const kind =
      v1::Op::descriptor()->FindFieldByNumber(static_cast<int>(op->kind_case()));
  if (kind == nullptr) return;
  Message* const message = op->GetReflection()->MutableMessage(op, kind);
  const FieldDescriptor* const field = message->GetDescriptor()->FindFieldByName("fence");
  if (field == nullptr) return;
  auto* const fence =
      static_cast<v1::Fence*>(message->GetReflection()->MutableMessage(message, field));
  fence->clear_worker_id();
  fence->clear_incarnation();
  fence->clear_term_seen();
  fence->clear_revision_seen();
}

std::optional<v1::OpError> CheckAccess(
    const Identity& who, const v1::Op& op,
    absl::FunctionRef<std::string(absl::string_view job)> owner_of) {
  if (who.role == Role::kAdmin) return std::nullopt;
  const Needs needs = NeedsOf(op.kind_case());
  bool allowed = false;
  switch (needs) {
    case Needs::kView:
      allowed = IsPerson(who.role);
      break;
    case Needs::kRead:
      allowed = IsPerson(who.role) || (who.role == Role::kAttempt && Covers(who, JobOf(op)));
      break;
    case Needs::kSubmit:
      allowed = who.role == Role::kSubmit;
      break;
    case Needs::kOwner:
      allowed =
          (who.role == Role::kSubmit && !who.name.empty() && owner_of(JobOf(op)) == who.name) ||
          (who.role == Role::kAttempt && !op.has_control_job() && Covers(who, JobOf(op)));
      break;
    case Needs::kAttempt:
      allowed = who.role == Role::kAttempt && Covers(who, JobOf(op));
      break;
    case Needs::kNode:
      allowed = who.role == Role::kNode;
      break;
    case Needs::kAdmin:
      break;
  }
  if (allowed) return std::nullopt;
  const auto* const kind =
      v1::Op::descriptor()->FindFieldByNumber(static_cast<int>(op.kind_case()));
  const absl::string_view job = JobOf(op);
  return Denied(who,
                absl::StrCat("call ", kind == nullptr ? "this" : kind->name(),
                             job.empty() ? "" : absl::StrCat(" of job ", Quoted(job))),
                InWords(needs));
}

std::optional<v1::OpError> CheckAccess(const Identity& who, Role needs, absl::string_view job,
                                       absl::string_view what) {
  if (who.role == Role::kAdmin || who.role == needs) {
    if (who.role != Role::kAttempt || Covers(who, job)) return std::nullopt;
  } else if (needs == Role::kView &&
             (who.role == Role::kSubmit || (who.role == Role::kAttempt && Covers(who, job)))) {
    return std::nullopt;
  }
  return Denied(who, what,
                needs == Role::kView      ? "role view, submit or admin"
                : needs == Role::kAttempt ? "the token of an attempt, or role admin"
                                          : absl::StrCat("role ", RoleName(needs)));
}

bool IsAudited(const v1::Op& op) {
  switch (NeedsOf(op.kind_case())) {
    case Needs::kSubmit:
    case Needs::kOwner:
    case Needs::kAdmin:
      return true;
    default:
      return false;
  }
}

}  // namespace muster::coordinator
