#include "coordinator/access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;

std::string NoOwner(absl::string_view) { return ""; }

// Returns an operation of every kind, about job `job` if the kind is about one.
std::vector<v1::Op> AllOps(const std::string& job) {
  std::vector<v1::Op> ops;
  const auto* const kinds = v1::Op::descriptor()->FindOneofByName("kind");
  for (int i = 0; i < kinds->field_count(); ++i) {
    v1::Op op;
    google::protobuf::Message* message = op.GetReflection()->MutableMessage(&op, kinds->field(i));
    if (const auto* const fence = message->GetDescriptor()->FindFieldByName("fence")) {
      message = message->GetReflection()->MutableMessage(message, fence);
    }
    if (const auto* const id = message->GetDescriptor()->FindFieldByName("job_id")) {
      message->GetReflection()->SetString(message, id, job);
    }
    ops.push_back(op);
  }
  return ops;
}

std::string NameOf(const v1::Op& op) {
  return v1::Op::descriptor()->FindFieldByNumber(static_cast<int>(op.kind_case()))->name();
}

std::set<std::string> Allowed(const Identity& who, const std::string& job,
                              const std::string& owner = "") {
  std::set<std::string> names;
  for (const v1::Op& op : AllOps(job)) {
    const auto owner_of = [&](absl::string_view) { return owner; };
    if (!CheckAccess(who, op, owner_of).has_value()) names.insert(NameOf(op));
  }
  return names;
}

TEST(AccessTest, Admin_MayDoEverything) {
  EXPECT_EQ(Allowed({.name = "root", .role = Role::kAdmin}, "j").size(), AllOps("j").size());
}

TEST(AccessTest, View_ReadsAndChangesNothing) {
  EXPECT_EQ(Allowed({.name = "bob", .role = Role::kView}, "j", "bob"),
            (std::set<std::string>{"get_rank_table", "describe_barrier", "list_barriers",
                                   "straggler_report", "get_members", "resolve_checkpoint",
                                   "list_checkpoints", "get_job", "list_jobs", "read_job_log",
                                   "list_nodes"}));
}

TEST(AccessTest, Submit_ActsOnItsOwnJobsOnly) {
  const Identity ann{.name = "ann", .role = Role::kSubmit};
  std::set<std::string> more = Allowed(ann, "j", "bob");
  for (const std::string& name : Allowed({.name = "ann", .role = Role::kView}, "j")) {
    EXPECT_EQ(more.erase(name), 1u) << name;
  }
  EXPECT_EQ(more, std::set<std::string>{"submit_job"});
  std::set<std::string> own = Allowed(ann, "j", "ann");
  for (const std::string& name : Allowed(ann, "j", "bob")) own.erase(name);
  EXPECT_EQ(own,
            (std::set<std::string>{"control_job", "raise_trigger", "cancel_barrier",
                                   "end_generation", "mark_checkpoint", "verify_checkpoint",
                                   "collect_checkpoints", "checkpoint_deleted", "capture_stacks"}));
  // A job without a known owner does not belong to a user without a name.
  v1::Op cancel;
  cancel.mutable_control_job()->set_job_id("j");
  EXPECT_TRUE(CheckAccess({.name = "", .role = Role::kSubmit}, cancel, NoOwner).has_value());
}

TEST(AccessTest, Node_RunsJobsAndNothingElse) {
  EXPECT_EQ(Allowed({.name = "nodes", .role = Role::kNode}, "j", "nodes"),
            (std::set<std::string>{"sync_node", "answer_log"}));
}

TEST(AccessTest, Attempt_TouchesItsOwnGroupOnly) {
  const Identity attempt{.role = Role::kAttempt, .group = "mnist-3.1"};
  const std::set<std::string> own = Allowed(attempt, "mnist-3.1", "ann");
  for (const char* name : {"join", "arrive", "arrive_many", "txn", "wait", "heartbeat",
                           "report_exit", "raise_trigger", "begin_checkpoint", "get_members"}) {
    EXPECT_TRUE(own.contains(name)) << name;
  }
  for (const char* name :
       {"submit_job", "control_job", "get_job", "list_jobs", "read_job_log", "sync_node",
        "answer_log", "control_node", "list_nodes", "remove_job", "quarantine"}) {
    EXPECT_FALSE(own.contains(name)) << name;
  }
  EXPECT_EQ(Allowed(attempt, "mnist-3.1.agents"), own);
  for (const char* other :
       {"mnist-3.2", "mnist-3.1.agents.agents", ".agents", "mnist-3", "mnist-3.1 ", ""}) {
    EXPECT_EQ(Allowed(attempt, other, "ann"), std::set<std::string>{}) << other;
  }
}

TEST(AccessTest, Refusal_NamesCallerCallAndWhatIsNeeded) {
  v1::Op op;
  op.mutable_control_job()->set_job_id("mnist-3");
  const auto error = CheckAccess({.name = "bob", .role = Role::kView}, op, NoOwner);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->detail().reason(), v1::ERROR_REASON_SCOPE);
  EXPECT_EQ(error->message(),
            "user \"bob\" of role view may not call control_job of job \"mnist-3\": it needs the "
            "owner of the job, or role admin");
  op.mutable_list_nodes();
  EXPECT_THAT(CheckAccess({.role = Role::kAttempt, .group = "a-1.1"}, op, NoOwner)->message(),
              HasSubstr("the token of \"a-1.1\" may not call list_nodes"));
}

TEST(AccessTest, UnknownOperation_NeedsAnAdmin) {
  for (const Role role : {Role::kView, Role::kSubmit, Role::kNode, Role::kAttempt}) {
    EXPECT_TRUE(CheckAccess({.name = "x", .role = role}, v1::Op(), NoOwner).has_value());
  }
  EXPECT_FALSE(CheckAccess({.role = Role::kAdmin}, v1::Op(), NoOwner).has_value());
}

TEST(AccessTest, JobOf_FindsItInEveryKindThatHasOne) {
  std::set<std::string> without;
  for (const v1::Op& op : AllOps("the job")) {
    if (JobOf(op) != "the job") without.insert(NameOf(op));
  }
  EXPECT_EQ(without, (std::set<std::string>{"submit_job", "list_jobs", "sync_node", "answer_log",
                                            "control_node", "list_nodes"}));
  EXPECT_EQ(JobOf(v1::Op()), "");
}

TEST(AccessTest, Streams_NeedTheirRole) {
  const auto allowed = [](const Identity& who, Role needs, absl::string_view job) {
    return !CheckAccess(who, needs, job, "watch").has_value();
  };
  const Identity attempt{.role = Role::kAttempt, .group = "a-1.1"};
  EXPECT_TRUE(allowed({.role = Role::kAdmin}, Role::kAttempt, "x"));
  EXPECT_TRUE(allowed({.role = Role::kView}, Role::kView, "x"));
  EXPECT_TRUE(allowed({.role = Role::kSubmit}, Role::kView, "x"));
  EXPECT_FALSE(allowed({.role = Role::kNode}, Role::kView, "x"));
  EXPECT_TRUE(allowed(attempt, Role::kView, "a-1.1"));
  EXPECT_FALSE(allowed(attempt, Role::kView, "a-1.2"));
  EXPECT_FALSE(allowed(attempt, Role::kView, ""));
  EXPECT_TRUE(allowed(attempt, Role::kAttempt, "a-1.1"));
  EXPECT_FALSE(allowed(attempt, Role::kAttempt, "a-1.2"));
  EXPECT_FALSE(allowed({.role = Role::kSubmit}, Role::kAttempt, ""));
  EXPECT_FALSE(allowed({.role = Role::kSubmit}, Role::kAdmin, ""));
}

TEST(AccessTest, Audit_IsOfPeoplesChanges) {
  std::set<std::string> audited;
  for (const v1::Op& op : AllOps("j")) {
    if (IsAudited(op)) audited.insert(NameOf(op));
  }
  EXPECT_EQ(audited,
            (std::set<std::string>{"submit_job", "control_job", "control_node", "raise_trigger",
                                   "cancel_barrier", "end_generation", "mark_checkpoint",
                                   "verify_checkpoint", "collect_checkpoints", "checkpoint_deleted",
                                   "quarantine", "remove_job", "capture_stacks"}));
}

TEST(AccessTest, Roles_HaveNames) {
  for (const Role role : {Role::kView, Role::kSubmit, Role::kNode, Role::kAdmin}) {
    EXPECT_EQ(ParseRole(RoleName(role)), role);
  }
  EXPECT_FALSE(ParseRole("attempt").has_value());  // only the coordinator makes these
  EXPECT_FALSE(ParseRole("Admin").has_value());
  EXPECT_FALSE(ParseRole("").has_value());
}

}  // namespace
}  // namespace muster::coordinator
