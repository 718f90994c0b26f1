#include "agent/node_groups.h"

#include <sys/xattr.h>
#include <unistd.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/log.h"
#include "base/status_macros.h"

namespace muster::agent {
namespace {

constexpr int64_t kMostBytes = 1 << 20;
constexpr absl::Duration kPatience = absl::Seconds(5);
// cpu.weight is 1 to 10000, and 100 for a group that sets none, such as the agent's own.
constexpr int kWeightOfCpu = 10;
constexpr int kMostWeight = 10'000;

const std::vector<std::string>& WantedControllers() {
  static const auto* const wanted = new std::vector<std::string>{"memory", "cpu"};
  return *wanted;
}

// mountinfo writes blanks and backslashes as octal numbers.
std::string Unescaped(absl::string_view text) {
  return absl::StrReplaceAll(text,
                             {{"\\040", " "}, {"\\011", "\t"}, {"\\012", "\n"}, {"\\134", "\\"}});
}

// Whether systemd has delegated the group (Delegate=yes).
bool IsDelegated(const std::string& folder) {
  for (const char* name : {"user.delegate", "trusted.delegate"}) {
    char value = 0;
    if (getxattr(folder.c_str(), name, &value, 1) == 1 && value == '1') return true;
  }
  return false;
}

// The systemd unit of a path is its last part that has the name of a unit.
bool IsInService(absl::string_view path) {
  bool service = false;
  for (const absl::string_view part : absl::StrSplit(path, '/')) {
    if (absl::EndsWith(part, ".service")) service = true;
    if (absl::EndsWith(part, ".scope") || absl::EndsWith(part, ".slice")) service = false;
  }
  return service;
}

bool IsWritable(const ControlGroup& group) {
  return access(group.folder().c_str(), W_OK) == 0 &&
         access(JoinPath(group.folder(), "cgroup.procs").c_str(), W_OK) == 0;
}

absl::StatusOr<OwnGroup> ReadOwnGroup(const std::string& proc) {
  MUSTER_ASSIGN_OR_RETURN(const std::string cgroup, ReadFile(JoinPath(proc, "cgroup"), kMostBytes));
  MUSTER_ASSIGN_OR_RETURN(const std::string mountinfo,
                          ReadFile(JoinPath(proc, "mountinfo"), kMostBytes));
  return FindOwnGroup(cgroup, mountinfo);
}

// The innermost folder that contains both: a process can move from one to the other only if its
// user may write there, too.
std::string CommonFolder(absl::string_view a, absl::string_view b) {
  std::string common;
  std::vector<std::string> left = absl::StrSplit(a, '/', absl::SkipEmpty());
  std::vector<std::string> right = absl::StrSplit(b, '/', absl::SkipEmpty());
  for (size_t i = 0; i < std::min(left.size(), right.size()) && left[i] == right[i]; ++i) {
    absl::StrAppend(&common, "/", left[i]);
  }
  return common.empty() ? "/" : common;
}

}  // namespace

std::string OwnGroup::folder() const {
  return path == "/" ? mount : JoinPath(mount, absl::StripPrefix(path, "/"));
}

absl::StatusOr<OwnGroup> FindOwnGroup(absl::string_view cgroup, absl::string_view mountinfo) {
  OwnGroup own;
  for (absl::string_view line : absl::StrSplit(cgroup, '\n')) {
    if (absl::ConsumePrefix(&line, "0::")) own.path = std::string(line);
  }
  // The form in which the kernel shows a group outside of the namespace.
  if (absl::StartsWith(own.path, "/..")) own.path.clear();
  for (const absl::string_view line : absl::StrSplit(mountinfo, '\n')) {
    const std::pair<absl::string_view, absl::string_view> halves =
        absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    const std::vector<absl::string_view> fields = absl::StrSplit(halves.first, ' ');
    if (!absl::StartsWith(halves.second, "cgroup2 ") || fields.size() < 5 || own.path.empty()) {
      continue;
    }
    // A part of the tree may be mounted separately.
    const std::string part = Unescaped(fields[3]);
    absl::string_view below = own.path;
    if (part != "/" &&
        (!absl::ConsumePrefix(&below, part) || (!below.empty() && !absl::StartsWith(below, "/")))) {
      continue;
    }
    own.mount = Unescaped(fields[4]);
    own.path = below.empty() ? "/" : std::string(below);
    return own;
  }
  return absl::NotFoundError("this machine has no cgroup v2, or this container does not see it");
}

NodeGroups::NodeGroups(NodeGroupsOptions options)
    : options_(std::move(options)), root_("", options_.calls) {}

void NodeGroups::Without(absl::string_view why) {
  used_ = false;
  why_ = std::string(why);
}

ControlGroup NodeGroups::Base() const { return root_.Below("muster-" + options_.node_uid); }

absl::Status NodeGroups::FindRoot() {
  const absl::StatusOr<OwnGroup> own = ReadOwnGroup(options_.proc);
  const bool named = options_.where != "auto";
  if (!own.ok() && !named) return own.status();
  root_ = ControlGroup(named ? options_.where : own->folder(), options_.calls);
  if (!root_.Exists()) {
    return absl::NotFoundError(absl::StrCat(root_.folder(), " is not a folder of cgroup v2"));
  }
  if (!IsWritable(root_)) {
    return absl::FailedPreconditionError(
        absl::StrCat("this user may not create groups in ", root_.folder(),
                     named ? "" : ", which is not delegated to it (Delegate=yes)"));
  }
  if (!own.ok()) return absl::OkStatus();
  const std::string common = CommonFolder(own->folder(), root_.folder());
  if (named && access(JoinPath(common, "cgroup.procs").c_str(), W_OK) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "this user may not move a process from ", own->folder(), " to ", root_.folder(),
        ": it would have to own ", JoinPath(common, "cgroup.procs"), ", too"));
  }
  if (!named && options_.root && PathExists(options_.systemd) && !IsDelegated(root_.folder())) {
    return absl::FailedPreconditionError(absl::StrCat(
        root_.folder(), " belongs to systemd and is not delegated to this agent (Delegate=yes)"));
  }
  may_limit_ = named || !IsInService(own->path);
  // Only the root of the whole tree has no type, and may have processes.
  moves_ = root_.folder() == own->folder() && root_.Has("cgroup.type");
  return absl::OkStatus();
}

absl::Status NodeGroups::EnableLimits() {
  const std::vector<std::string> controllers = root_.Controllers();
  const auto has = [&](const char* name) {
    return std::count(controllers.begin(), controllers.end(), name) > 0;
  };
  if (!has("memory")) {
    return absl::FailedPreconditionError(absl::StrCat(root_.folder(), " has no memory controller"));
  }
  if (!may_limit_) {
    return absl::FailedPreconditionError(
        absl::StrCat(root_.folder(),
                     " is the group of a service: with limits below it, systemd could not start "
                     "the next agent while jobs run; pass a separate group to --control_groups"));
  }
  if (moves_) {
    const ControlGroup agent = root_.Below("agent");
    MUSTER_RETURN_IF_ERROR(agent.Make());
    MUSTER_RETURN_IF_ERROR(agent.Enter());
    moves_ = false;
  }
  MUSTER_RETURN_IF_ERROR(root_.Enable(WantedControllers()));
  limits_memory_ = true;
  limits_cpus_ = options_.limit_cpus && has("cpu");
  if (options_.limit_cpus && !limits_cpus_) {
    return absl::FailedPreconditionError(absl::StrCat(root_.folder(), " has no cpu controller"));
  }
  return absl::OkStatus();
}

absl::StatusOr<NodeGroups> NodeGroups::Open(NodeGroupsOptions options) {
  NodeGroups groups(std::move(options));
  const std::string& where = groups.options_.where;
  if (where == "off") {
    groups.Without("the agent was started with --control_groups off");
    return groups;
  }
  const bool named = where != "auto";
  absl::Status status = groups.FindRoot();
  if (!status.ok()) {
    if (named) return status;
    groups.Without(status.message());
    return groups;
  }
  groups.used_ = true;
  // A read-only file system reports that only now.
  const ControlGroup probe = groups.root_.Below(absl::StrCat("muster-probe-", RandomHex()));
  status = probe.Make();
  if (status.ok()) status = probe.Remove();
  if (!status.ok()) {
    if (named) return status;
    groups.Without(status.message());
    return groups;
  }
  status = groups.EnableLimits();
  if (!status.ok() && named) return status;
  groups.why_ = std::string(status.message());
  return groups;
}

std::string NodeGroups::ToString() const {
  const std::string missing = why_.empty() ? "" : absl::StrCat(": ", why_);
  if (!used_) return absl::StrCat("no control groups", missing);
  const std::string limits = !limits_memory_ ? "without limits"
                             : limits_cpus_  ? "with limits of memory and CPUs"
                                             : "with limits of memory";
  return absl::StrCat("control groups ", limits, " in ", root_.folder(), missing);
}

absl::StatusOr<std::string> NodeGroups::MakeAttempt(const std::string& name, int cpus) {
  if (!used_) return "";
  if (!limits_memory_) {
    // Processes that were in the way may have ended.
    why_ = std::string(EnableLimits().message());
  }
  const ControlGroup attempt = Base().Below(name);
  const absl::Status status = Fill(attempt, cpus);
  if (status.ok()) return attempt.folder();
  attempt.Remove().IgnoreError();
  return status;
}

absl::Status NodeGroups::Fill(const ControlGroup& attempt, int cpus) const {
  MUSTER_RETURN_IF_ERROR(Base().Make());
  if (limits_memory_) MUSTER_RETURN_IF_ERROR(Base().Enable(WantedControllers()));
  MUSTER_RETURN_IF_ERROR(attempt.Make());
  if (limits_memory_) MUSTER_RETURN_IF_ERROR(attempt.Enable(WantedControllers()));
  if (attempt.Has("cpu.weight")) {
    const int64_t weight = std::clamp<int64_t>(int64_t{cpus} * kWeightOfCpu, 1, kMostWeight);
    MUSTER_RETURN_IF_ERROR(attempt.Write("cpu.weight", absl::StrCat(weight)));
  }
  return attempt.Below("runner").Make();
}

void NodeGroups::Sweep(const std::set<std::string>& running) const {
  if (!used_) return;
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(Base().folder());
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    const ControlGroup group = Base().Below(name);
    if (!group.Exists() || running.count(group.folder()) > 0) continue;
    MUSTER_LOG(Info) << "removing the control group " << group.folder()
                     << ", which an earlier agent has left";
    group.Kill();
    absl::Status status = group.AwaitEmpty(kPatience);
    if (status.ok()) status = group.Remove();
    if (!status.ok()) MUSTER_LOG(Warning) << status.message();
  }
}

}  // namespace muster::agent
