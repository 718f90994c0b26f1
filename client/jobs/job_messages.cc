#include "client/jobs/job_messages.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/strip.h"
#include "proto/end_class.h"
#include "proto/failure_policy.h"
#include "proto/name_value.h"
#include "rpc/log_level.h"
#include "rpc/session/duration.h"

namespace muster {
namespace {

constexpr absl::string_view kStateNames[] = {"UNKNOWN",   "QUEUED",   "STARTING",
                                             "RUNNING",   "STOPPING", "SUSPENDED",
                                             "SUCCEEDED", "FAILED",   "CANCELLED"};

}  // namespace

absl::string_view JobStateName(JobState state) { return kStateNames[static_cast<int>(state)]; }

bool HasEnded(JobState state) {
  return state == JobState::kSucceeded || state == JobState::kFailed ||
         state == JobState::kCancelled;
}

namespace client {
namespace {

JobState FromProto(v1::JobState state) {
  return state >= v1::JOB_STATE_QUEUED && state <= v1::JOB_STATE_CANCELLED
             ? static_cast<JobState>(static_cast<int>(state))
             : JobState::kUnknown;
}

std::string EnumWord(const std::string& name, absl::string_view prefix) {
  return name.empty() ? "UNKNOWN" : std::string(absl::StripPrefix(name, prefix));
}

absl::Time TimeOf(int64_t unix_ms) {
  return unix_ms == 0 ? absl::InfinitePast() : absl::FromUnixMillis(unix_ms);
}

Placement FromProto(const v1::Placement& placement) {
  return {.node = placement.node(),
          .node_rank = placement.node_rank(),
          .processes = placement.processes(),
          .gpus = {placement.gpus().begin(), placement.gpus().end()},
          .state = EnumWord(v1::PlacementState_Name(placement.state()), "PLACEMENT_STATE_")};
}

Attempt FromProto(const v1::JobAttempt& attempt) {
  Attempt result;
  result.number = attempt.number();
  result.restarts = attempt.restarts();
  for (const v1::Placement& placement : attempt.placements())
    result.placements.push_back(FromProto(placement));
  if (attempt.has_end()) {
    const v1::AttemptEnd& end = attempt.end();
    result.has_end = true;
    result.end_class = EndClassName(end.end_class());
    result.why = end.why();
    result.node = end.node();
    result.rank = end.rank();
    result.exit_code = end.exit_code();
    result.signal = end.signal();
    result.last_lines = {end.last_lines().begin(), end.last_lines().end()};
    for (const v1::HungRanks& hung : end.hung()) {
      result.hung.push_back({.ranks = {hung.ranks().begin(), hung.ranks().end()},
                             .doing = hung.doing(),
                             .stack = hung.stack()});
    }
  }
  result.started = TimeOf(attempt.started_unix_ms());
  result.ended = TimeOf(attempt.ended_unix_ms());
  const v1::AttemptTimes& times = attempt.times();
  result.times = {.placed = TimeOf(times.placed_unix_ms()),
                  .sealed = TimeOf(times.sealed_unix_ms()),
                  .restored = TimeOf(times.restored_unix_ms()),
                  .stepped = TimeOf(times.stepped_unix_ms()),
                  .failed = TimeOf(times.failed_unix_ms()),
                  .detected = TimeOf(times.detected_unix_ms()),
                  .decided = TimeOf(times.decided_unix_ms()),
                  .fenced = TimeOf(times.fenced_unix_ms())};
  return result;
}

}  // namespace

v1::JobState ToProto(JobState state) { return static_cast<v1::JobState>(static_cast<int>(state)); }

v1::JobSpec ToProto(const JobSpec& spec) {
  v1::JobSpec message;
  message.set_name(spec.name);
  message.mutable_argv()->Assign(spec.command.begin(), spec.command.end());
  for (const auto& [name, value] : spec.env) AddNameValue(name, value, message.mutable_env());
  message.set_working_directory(spec.workdir);
  message.mutable_per_process()->set_gpus(spec.gpus_per_process);
  message.mutable_per_process()->set_cpus(spec.cpus_per_process);
  message.mutable_per_process()->set_memory_bytes(spec.memory_per_process);
  message.mutable_per_process()->set_gpu_memory_bytes(spec.gpu_memory);
  message.set_min_processes(spec.min_processes);
  message.set_max_processes(spec.max_processes);
  message.set_processes_per_node(spec.processes_per_node);
  for (const auto& [name, value] : spec.labels) {
    AddNameValue(name, value, message.mutable_node_labels());
  }
  message.set_priority(spec.priority);
  message.set_preemptible(spec.preemptible);
  message.set_max_restarts(spec.max_restarts);
  const absl::Duration zero = absl::ZeroDuration();
  if (spec.restart_delay > zero)
    *message.mutable_restart_delay() = rpc::ToProto(spec.restart_delay);
  if (spec.time_limit > zero) *message.mutable_time_limit() = rpc::ToProto(spec.time_limit);
  if (spec.stop_grace > zero) *message.mutable_stop_grace() = rpc::ToProto(spec.stop_grace);
  if (spec.grow_after > zero) *message.mutable_grow_after() = rpc::ToProto(spec.grow_after);
  if (spec.hang_timeout > zero) *message.mutable_hang_timeout() = rpc::ToProto(spec.hang_timeout);
  message.set_spare_nodes(spec.spare_nodes);
  message.mutable_user_error_codes()->Assign(spec.user_error_codes.begin(),
                                             spec.user_error_codes.end());
  *message.mutable_class_limits() = ToClassCounts(spec.class_limits);
  for (const JobFile& file : spec.files) {
    v1::JobFile* const sent = message.add_files();
    sent->set_path(file.path);
    sent->set_content(file.content);
    sent->set_executable(file.executable);
  }
  if (spec.retention > zero) *message.mutable_retention() = rpc::ToProto(spec.retention);
  message.set_wait_for_nodes(spec.wait_for_nodes);
  message.set_mixed_precision(spec.mixed_precision);
  message.set_gradient_accumulation_steps(spec.gradient_accumulation_steps);
  message.set_cpu(spec.cpu);
  message.set_debug(spec.debug);
  return message;
}

JobSpec FromProto(const v1::JobSpec& message) {
  JobSpec spec;
  spec.name = message.name();
  spec.command = {message.argv().begin(), message.argv().end()};
  spec.env = ToMap(message.env());
  spec.workdir = message.working_directory();
  spec.min_processes = message.min_processes();
  spec.max_processes = message.max_processes();
  spec.processes_per_node = message.processes_per_node();
  spec.gpus_per_process = message.per_process().gpus();
  spec.cpus_per_process = message.per_process().cpus();
  spec.memory_per_process = message.per_process().memory_bytes();
  spec.gpu_memory = message.per_process().gpu_memory_bytes();
  spec.labels = ToMap(message.node_labels());
  spec.priority = message.priority();
  spec.preemptible = message.preemptible();
  spec.max_restarts = message.max_restarts();
  spec.restart_delay = rpc::FromProto(message.restart_delay());
  spec.time_limit = rpc::FromProto(message.time_limit());
  spec.stop_grace = rpc::FromProto(message.stop_grace());
  spec.grow_after = rpc::FromProto(message.grow_after());
  spec.hang_timeout = rpc::FromProto(message.hang_timeout());
  spec.spare_nodes = message.spare_nodes();
  spec.user_error_codes = {message.user_error_codes().begin(), message.user_error_codes().end()};
  for (const v1::ClassCount& limit : message.class_limits()) {
    for (const auto& [name, end_class] : kLimitedClasses) {
      if (end_class == limit.end_class()) spec.class_limits[std::string(name)] = limit.count();
    }
  }
  for (const v1::JobFile& file : message.files()) {
    spec.files.push_back({.path = file.path(),
                          .content = file.content(),
                          .executable = file.executable(),
                          .sha256 = absl::BytesToHexString(file.sha256()),
                          .size = file.size()});
  }
  spec.retention = rpc::FromProto(message.retention());
  spec.wait_for_nodes = message.wait_for_nodes();
  spec.mixed_precision = message.mixed_precision();
  spec.gradient_accumulation_steps = message.gradient_accumulation_steps();
  spec.cpu = message.cpu();
  spec.debug = message.debug();
  return spec;
}

Job FromProto(const v1::JobRecord& record) {
  Job job;
  job.id = record.job_id();
  job.spec = FromProto(record.spec());
  job.owner = record.owner();
  job.state = FromProto(record.state());
  job.why = record.why();
  job.attempts = record.attempts();
  job.restarts = record.restarts();
  for (const v1::JobAttempt& attempt : record.history()) job.history.push_back(FromProto(attempt));
  for (const v1::Placement& spare : record.spares()) job.spares.push_back(FromProto(spare));
  job.sequence = record.sequence();
  job.revision = record.revision();
  job.submitted = TimeOf(record.submitted_unix_ms());
  return job;
}

JobPlan FromProto(const v1::JobPlan& plan) {
  JobPlan result;
  result.starts_now = plan.starts_now();
  result.why = plan.why();
  result.processes = plan.processes();
  for (const v1::Placement& placement : plan.placements())
    result.placements.push_back(FromProto(placement));
  for (const v1::Placement& spare : plan.spares()) result.spares.push_back(FromProto(spare));
  for (const v1::PlannedPort& port : plan.ports()) {
    result.ports.push_back({.name = port.name(),
                            .node = port.node(),
                            .first = port.first(),
                            .last = port.last(),
                            .why = port.why()});
  }
  const v1::PlannedCheckpoint& checkpoint = plan.checkpoint();
  result.checkpoint = {.decided_by = checkpoint.decided_by(),
                       .path = checkpoint.record().path(),
                       .step = checkpoint.record().step(),
                       .saved_by = checkpoint.record().job_id(),
                       .folder = checkpoint.folder(),
                       .why = checkpoint.why()};
  return result;
}

Node FromProto(const v1::NodeRecord& record) {
  Node node;
  node.name = record.node();
  node.known = record.has_info();
  node.host = record.info().host();
  node.version = record.info().version();
  node.cpus = record.info().cpus();
  node.memory_bytes = record.info().memory_bytes();
  node.gpus = {record.info().gpus().begin(), record.info().gpus().end()};
  node.gpu_memory_bytes = {record.info().gpu_memory_bytes().begin(),
                           record.info().gpu_memory_bytes().end()};
  node.labels = ToMap(record.info().labels());
  node.rack = record.info().rack();
  node.nvlink_domain = record.info().nvlink_domain();
  if (record.info().limits_memory()) node.limits.push_back("memory");
  if (record.info().limits_cpus()) node.limits.push_back("cpus");
  node.limits_why = record.info().limits_why();
  node.cordoned = record.cordoned();
  node.draining = record.draining();
  node.lost = record.lost();
  node.why = record.why();
  node.heard_ago = rpc::FromProto(record.heard_ago());
  node.used_cpus = record.used_cpus();
  node.used_memory_bytes = record.used_memory_bytes();
  node.used_gpus = {record.used_gpus().begin(), record.used_gpus().end()};
  node.jobs = {record.jobs().begin(), record.jobs().end()};
  node.spare_of = {record.spare_of().begin(), record.spare_of().end()};
  const int level = record.info().log_level();
  if (level != 0) node.log_level = rpc::LogLevelName(static_cast<v1::LogLevel>(level));
  return node;
}

}  // namespace client
}  // namespace muster
