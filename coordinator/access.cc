#include "coordinator/access.h"

#include <xxhash.h>

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/defaults.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// The callers, besides admins, that may do an operation.
enum class Needs {
  kView,     // every person
  kSubmit,   // every person with the role submit
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
    case v1::Op::kVerifyCheckpoint:
    case v1::Op::kCollectCheckpoints:
    case v1::Op::kCheckpointDeleted:
    case v1::Op::kCaptureStacks:  // stops the processes for a moment
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

// The fields of one kind of operation; null: it lacks the field.
struct OpFields {
  const FieldDescriptor* kind = nullptr;    // in Op
  const FieldDescriptor* fence = nullptr;   // in the request
  const FieldDescriptor* job_id = nullptr;  // in the fence, else in the request
};

constexpr int kKinds = 128;  // a test compares it with the proto

std::array<OpFields, kKinds> FindFields() {
  std::array<OpFields, kKinds> all;
  const auto* const kinds = v1::Op::descriptor()->FindOneofByName("kind");
  for (int i = 0; i < kinds->field_count(); ++i) {
    const FieldDescriptor* const kind = kinds->field(i);
    OpFields& fields = all.at(static_cast<size_t>(kind->number()));
    fields.kind = kind;
    fields.fence = kind->message_type()->FindFieldByName("fence");
    const auto* const of =
        fields.fence != nullptr ? fields.fence->message_type() : kind->message_type();
    fields.job_id = of->FindFieldByName("job_id");
  }
  return all;
}

const OpFields& FieldsOf(const v1::Op& op) {
  static const auto& all = *new std::array<OpFields, kKinds>(FindFields());
  return all.at(static_cast<size_t>(op.kind_case()));
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

absl::string_view NameOf(const v1::Op& op) {
  const FieldDescriptor* const kind = FieldsOf(op).kind;
  return kind == nullptr ? absl::string_view() : kind->name();
}

absl::string_view JobOf(const v1::Op& op) {
  const OpFields& fields = FieldsOf(op);
  if (fields.job_id == nullptr) return "";
  const Message* message = &op.GetReflection()->GetMessage(op, fields.kind);
  if (fields.fence != nullptr) {
    message = &message->GetReflection()->GetMessage(*message, fields.fence);
  }
  std::string scratch;  // not used for a field that is a plain string
  return message->GetReflection()->GetStringReference(*message, fields.job_id, &scratch);
}

void ForgetWorker(absl::string_view person, v1::Op* op) {
  const OpFields& fields = FieldsOf(*op);
  if (fields.fence == nullptr) return;
  Message* const message = op->GetReflection()->MutableMessage(op, fields.kind);
  auto* const fence =
      static_cast<v1::Fence*>(message->GetReflection()->MutableMessage(message, fields.fence));
  fence->clear_worker_id();
  if (fence->incarnation() != 0) {
    const uint64_t process =
        XXH3_64bits_withSeed(person.data(), person.size(), fence->incarnation());
    fence->set_incarnation(std::max<uint64_t>(1, process));
  }
  fence->clear_term_seen();
  fence->clear_revision_seen();
}

std::optional<v1::OpError> CheckAccess(
    const Identity& who, const v1::Op& op,
    absl::FunctionRef<std::string(absl::string_view job)> owner_of) {
  if (who.role == Role::kAdmin) return std::nullopt;
  const Needs needs = NeedsOf(op.kind_case());
  const absl::string_view name = NameOf(op), job = JobOf(op);
  const bool is_attempt = who.role == Role::kAttempt && Covers(who, job);
  bool allowed = false;
  switch (needs) {
    case Needs::kView:
      allowed = IsPerson(who.role);
      break;
    case Needs::kRead:
      allowed = IsPerson(who.role) || is_attempt;
      break;
    case Needs::kSubmit:
      allowed = who.role == Role::kSubmit;
      break;
    case Needs::kOwner:
      allowed = (who.role == Role::kSubmit && !who.name.empty() && owner_of(job) == who.name) ||
                (is_attempt && !op.has_control_job());
      break;
    case Needs::kAttempt:
      allowed = is_attempt;
      break;
    case Needs::kNode:
      allowed = who.role == Role::kNode;
      break;
    case Needs::kAdmin:
      break;
  }
  if (allowed) return std::nullopt;
  return Denied(who,
                absl::StrCat("call ", name.empty() ? "this" : name,
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
