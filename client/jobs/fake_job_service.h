#ifndef MUSTER_CLIENT_JOBS_FAKE_JOB_SERVICE_H_
#define MUSTER_CLIENT_JOBS_FAKE_JOB_SERVICE_H_

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/mutex.h"
#include "proto/muster/v1/checkpoint.grpc.pb.h"
#include "proto/muster/v1/job.grpc.pb.h"
#include "proto/muster/v1/node.grpc.pb.h"
#include "rpc/server.h"
#include "rpc/status.h"

namespace muster::client {

// A coordinator's Jobs and Nodes for tests: it answers from what the test gives it. Every held Get
// takes the next record of `changes`. Thread-safe.
class FakeJobService {
 public:
  FakeJobService() : jobs_(this), nodes_(this), checkpoints_(this) {
    auto server = rpc::Server::Start({.insecure = true}, {&jobs_, &nodes_, &checkpoints_});
    MUSTER_CHECK(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  ~FakeJobService() { server_->Shutdown(absl::ZeroDuration()); }

  std::string address() const { return server_->address(); }

  void Add(v1::JobRecord job) {
    MutexLock lock(&mu_);
    records_.push_back(std::move(job));
  }
  void AddNode(v1::NodeRecord node) {
    MutexLock lock(&mu_);
    node_records_.push_back(std::move(node));
  }
  void Change(v1::JobRecord job) {
    MutexLock lock(&mu_);
    changes_.push_back(std::move(job));
  }
  void RefuseSubmissions(absl::Status why) {
    MutexLock lock(&mu_);
    refusal_ = std::move(why);
  }
  // Removes a job that a watch knows.
  void Remove(const std::string& job) {
    MutexLock lock(&mu_);
    removed_.push_back(job);
    for (auto it = records_.begin(); it != records_.end(); ++it) {
      if (it->job_id() != job) continue;
      records_.erase(it);
      break;
    }
  }
  // Each of the next `messages` of watches that report something is followed by the end of the
  // stream, as if the coordinator restarted; afterwards it no longer knows what was removed.
  void BreakWatches(int messages) {
    MutexLock lock(&mu_);
    break_ = messages;
  }
  // After this many messages a watch ends with an error: the caller may see no more.
  void RefuseWatchesAfter(int messages) {
    MutexLock lock(&mu_);
    refuse_ = messages;
  }
  // Answers like a coordinator that is older than the call.
  void HaveNoWatch() {
    MutexLock lock(&mu_);
    no_watch_ = true;
  }
  // The revisions from which watches continued.
  std::vector<uint64_t> watched_from() {
    MutexLock lock(&mu_);
    return watched_from_;
  }
  // The next calls of any kind are lost.
  void Lose(int calls) {
    MutexLock lock(&mu_);
    lose_ = calls;
  }
  // The next reads of this attempt's log fail; -1: all.
  void FailLog(int attempt, grpc::StatusCode code, int times = -1) {
    MutexLock lock(&mu_);
    failing_logs_[attempt] = {code, times};
  }
  // The bytes of each log before that offset were rotated away.
  void SetLogBegin(size_t offset) {
    MutexLock lock(&mu_);
    log_begin_ = offset;
  }
  void SetLog(int attempt, int rank, std::string text) {
    MutexLock lock(&mu_);
    logs_[{attempt, rank}] = std::move(text);
  }
  // The groups whose checkpoints were requested.
  std::vector<std::string> checkpoints_of() {
    MutexLock lock(&mu_);
    return checkpoints_of_;
  }
  std::vector<v1::SubmitJobRequest> submitted() {
    MutexLock lock(&mu_);
    return submitted_;
  }
  // "CANCEL mnist-1 why", "DRAIN a why".
  std::vector<std::string> actions() {
    MutexLock lock(&mu_);
    return actions_;
  }

 private:
  bool Lost() {
    MutexLock lock(&mu_);
    return lose_ > 0 && lose_-- > 0;
  }
  static grpc::Status Away() { return {grpc::StatusCode::UNAVAILABLE, "it stops"}; }
  static grpc::Status NoJob(const std::string& job) {
    return {grpc::StatusCode::NOT_FOUND, "there is no job " + job};
  }
  v1::JobRecord* Find(const std::string& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (v1::JobRecord& record : records_) {
      if (record.job_id() == job) return &record;
    }
    return nullptr;
  }

  class Jobs final : public v1::Jobs::Service {
   public:
    explicit Jobs(FakeJobService* fake) : fake_(fake) {}
    grpc::Status Submit(grpc::ServerContext*, const v1::SubmitJobRequest* request,
                        v1::SubmitJobReply* reply) override {
      {
        MutexLock lock(&fake_->mu_);
        fake_->submitted_.push_back(*request);
      }
      if (fake_->Lost()) return Away();
      MutexLock lock(&fake_->mu_);
      if (!fake_->refusal_.ok()) return rpc::ToGrpc(fake_->refusal_);
      v1::JobRecord* const job = reply->mutable_job();
      job->set_job_id(request->spec().name() + "-1");
      *job->mutable_spec() = request->spec();
      job->set_state(v1::JOB_STATE_QUEUED);
      job->set_revision(1);
      reply->mutable_plan()->set_starts_now(true);
      reply->mutable_plan()->set_why("fits now");
      reply->mutable_plan()->set_processes(request->spec().max_processes());
      v1::Placement* const placement = reply->mutable_plan()->add_placements();
      placement->set_node("a");
      placement->set_processes(request->spec().max_processes());
      if (request->dry_run()) {
        v1::PlannedPort* const port = reply->mutable_plan()->add_ports();
        port->set_name("master_port");
        port->set_node("a");
        port->set_first(32768);
        port->set_last(60999);
        v1::PlannedCheckpoint* const from = reply->mutable_plan()->mutable_checkpoint();
        from->set_decided_by("program");
        from->mutable_record()->set_path("/w/muster-run/checkpoints/checkpoint_3");
        from->mutable_record()->set_step(300);
        from->mutable_record()->set_job_id("old-1.2");
        from->set_why("the newest there");
      }
      if (!request->dry_run() && fake_->Find(job->job_id()) == nullptr)
        fake_->records_.push_back(*job);
      return grpc::Status::OK;
    }
    grpc::Status Get(grpc::ServerContext*, const v1::GetJobRequest* request,
                     v1::GetJobReply* reply) override {
      if (fake_->Lost()) return Away();
      MutexLock lock(&fake_->mu_);
      v1::JobRecord* const job = fake_->Find(request->job_id());
      if (job == nullptr) return NoJob(request->job_id());
      if (request->seen_revision() == job->revision() && !fake_->changes_.empty()) {
        *job = fake_->changes_.front();
        fake_->changes_.erase(fake_->changes_.begin());
      }
      *reply->mutable_job() = *job;
      return grpc::Status::OK;
    }
    // Every message takes the next record of `changes`.
    grpc::Status Watch(grpc::ServerContext* context, const v1::WatchJobsRequest* request,
                       grpc::ServerWriter<v1::WatchJobsBatch>* writer) override {
      if (fake_->Lost()) return Away();
      uint64_t seen = request->seen_revision();
      {
        MutexLock lock(&fake_->mu_);
        if (fake_->no_watch_) return {grpc::StatusCode::UNIMPLEMENTED, "no such method"};
        fake_->watched_from_.push_back(seen);
      }
      for (bool first = true; !context->IsCancelled(); first = false) {
        v1::WatchJobsBatch batch;
        bool end = false, refused = false;
        {
          MutexLock lock(&fake_->mu_);
          if (!first && !fake_->changes_.empty()) {
            v1::JobRecord* const job = fake_->Find(fake_->changes_.front().job_id());
            if (job != nullptr) *job = fake_->changes_.front();
            fake_->changes_.erase(fake_->changes_.begin());
          }
          if (!request->job_id().empty() && fake_->Find(request->job_id()) == nullptr) {
            return NoJob(request->job_id());
          }
          batch.set_lists_kept(first && seen != 0 && request->job_id().empty());
          uint64_t last = seen;
          for (const v1::JobRecord& job : fake_->records_) {
            if (!request->job_id().empty() && job.job_id() != request->job_id()) continue;
            if (!absl::StartsWith(job.job_id(), request->name_prefix())) continue;
            if (batch.lists_kept()) batch.add_kept(job.job_id());
            if (job.revision() > seen) {
              // Only the last attempt, as a coordinator lists it.
              v1::JobRecord* const listed = batch.add_jobs();
              *listed = job;
              while (listed->history_size() > 1) listed->mutable_history()->DeleteSubrange(0, 1);
            }
            last = std::max(last, job.revision());
          }
          seen = last;
          if (!batch.lists_kept()) {
            for (const std::string& id : fake_->removed_) batch.add_gone(id);
          }
          fake_->removed_.clear();
          batch.set_seen_revision(seen);
          if (!first && batch.jobs_size() == 0 && batch.gone_size() == 0) {
            fake_->changed_.WaitWithTimeout(&fake_->mu_, absl::Milliseconds(5));
            continue;
          }
          const bool tells = batch.jobs_size() > 0 || batch.gone_size() > 0;
          end = tells && fake_->break_ > 0 && fake_->break_-- > 0;
          refused = tells && fake_->refuse_ > 0 && --fake_->refuse_ == 0;
        }
        if (!writer->Write(batch) || end) break;
        if (refused) return {grpc::StatusCode::PERMISSION_DENIED, "the token has expired"};
      }
      return Away();
    }
    grpc::Status List(grpc::ServerContext*, const v1::ListJobsRequest* request,
                      v1::ListJobsReply* reply) override {
      if (fake_->Lost()) return Away();
      MutexLock lock(&fake_->mu_);
      for (const v1::JobRecord& job : fake_->records_) {
        if (job.sequence() <= request->after_sequence() && request->after_sequence() != 0) continue;
        if (!absl::StartsWith(job.job_id(), request->name_prefix())) continue;
        if (request->states_size() != 0 &&
            std::count(request->states().begin(), request->states().end(), job.state()) == 0) {
          continue;
        }
        // Pages of two.
        if (reply->jobs_size() == 2) {
          reply->set_more(true);
          break;
        }
        *reply->add_jobs() = job;
      }
      return grpc::Status::OK;
    }
    grpc::Status Control(grpc::ServerContext*, const v1::ControlJobRequest* request,
                         v1::ControlJobReply* reply) override {
      if (fake_->Lost()) return Away();
      MutexLock lock(&fake_->mu_);
      v1::JobRecord* const job = fake_->Find(request->job_id());
      if (job == nullptr) return NoJob(request->job_id());
      fake_->actions_.push_back(absl::StrCat(v1::JobAction_Name(request->action()).substr(11), " ",
                                             request->job_id(), " ", request->why(),
                                             request->after_attempt()));
      if (request->action() == v1::JOB_ACTION_RESIZE) {
        job->mutable_spec()->set_min_processes(request->min_processes());
        job->mutable_spec()->set_max_processes(request->max_processes());
      }
      *reply->mutable_job() = *job;
      return grpc::Status::OK;
    }
    grpc::Status ReadLog(grpc::ServerContext*, const v1::ReadJobLogRequest* request,
                         v1::ReadJobLogReply* reply) override {
      if (fake_->Lost()) return Away();
      MutexLock lock(&fake_->mu_);
      v1::JobRecord* const job = fake_->Find(request->job_id());
      if (job == nullptr) return NoJob(request->job_id());
      const int attempt = request->attempt() == 0 ? job->attempts() : request->attempt();
      if (auto& [code, times] = fake_->failing_logs_[attempt]; times != 0) {
        times -= times > 0 ? 1 : 0;
        return {code, "the node does not answer"};
      }
      const auto log = fake_->logs_.find({attempt, request->rank()});
      if (log == fake_->logs_.end())
        return {grpc::StatusCode::NOT_FOUND, absl::StrCat("no rank ", request->rank())};
      // Five bytes at a time, so that lines are cut.
      const size_t offset = std::max<size_t>(
          fake_->log_begin_, request->offset() < 0 ? 0 : static_cast<size_t>(request->offset()));
      const std::string data = offset < log->second.size() ? log->second.substr(offset, 5) : "";
      reply->set_data(data);
      reply->set_offset(static_cast<int64_t>(offset));
      reply->set_next_offset(static_cast<int64_t>(offset + data.size()));
      reply->set_ended(offset + data.size() >= log->second.size());
      reply->set_attempt(attempt);
      reply->set_node("a");
      return grpc::Status::OK;
    }

   private:
    FakeJobService* const fake_;
  };

  class Nodes final : public v1::Nodes::Service {
   public:
    explicit Nodes(FakeJobService* fake) : fake_(fake) {}
    grpc::Status List(grpc::ServerContext*, const v1::ListNodesRequest*,
                      v1::ListNodesReply* reply) override {
      MutexLock lock(&fake_->mu_);
      for (const v1::NodeRecord& node : fake_->node_records_) *reply->add_nodes() = node;
      return grpc::Status::OK;
    }
    grpc::Status Control(grpc::ServerContext*, const v1::ControlNodeRequest* request,
                         v1::ControlNodeReply*) override {
      MutexLock lock(&fake_->mu_);
      for (const v1::NodeRecord& node : fake_->node_records_) {
        if (node.node() != request->node()) continue;
        fake_->actions_.push_back(absl::StrCat(v1::NodeAction_Name(request->action()).substr(12),
                                               " ", request->node(), " ", request->why()));
        return grpc::Status::OK;
      }
      return {grpc::StatusCode::NOT_FOUND, "there is no node " + request->node()};
    }

   private:
    FakeJobService* const fake_;
  };

  // No group has any.
  class Checkpoints final : public v1::Checkpoints::Service {
   public:
    explicit Checkpoints(FakeJobService* fake) : fake_(fake) {}
    grpc::Status List(grpc::ServerContext*, const v1::ListCheckpointsRequest* request,
                      v1::ListCheckpointsReply*) override {
      MutexLock lock(&fake_->mu_);
      fake_->checkpoints_of_.push_back(request->fence().job_id());
      return NoJob(request->fence().job_id());
    }

   private:
    FakeJobService* const fake_;
  };

  Mutex mu_;
  CondVar changed_;
  std::vector<std::string> checkpoints_of_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> removed_ ABSL_GUARDED_BY(mu_);
  std::vector<uint64_t> watched_from_ ABSL_GUARDED_BY(mu_);
  int break_ ABSL_GUARDED_BY(mu_) = 0, refuse_ ABSL_GUARDED_BY(mu_) = 0;
  bool no_watch_ ABSL_GUARDED_BY(mu_) = false;
  std::vector<v1::JobRecord> records_ ABSL_GUARDED_BY(mu_);
  std::vector<v1::NodeRecord> node_records_ ABSL_GUARDED_BY(mu_);
  std::vector<v1::JobRecord> changes_ ABSL_GUARDED_BY(mu_);
  std::map<std::pair<int, int>, std::string> logs_ ABSL_GUARDED_BY(mu_);
  std::map<int, std::pair<grpc::StatusCode, int>> failing_logs_ ABSL_GUARDED_BY(mu_);
  size_t log_begin_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status refusal_ ABSL_GUARDED_BY(mu_);
  std::vector<v1::SubmitJobRequest> submitted_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> actions_ ABSL_GUARDED_BY(mu_);
  int lose_ ABSL_GUARDED_BY(mu_) = 0;
  Jobs jobs_;
  Nodes nodes_;
  Checkpoints checkpoints_;
  std::unique_ptr<rpc::Server> server_;
};

inline v1::JobRecord FakeJob(const std::string& id, v1::JobState state, uint64_t sequence,
                             uint64_t revision = 1) {
  v1::JobRecord job;
  job.set_job_id(id);
  job.mutable_spec()->set_name(id.substr(0, id.rfind('-')));
  job.mutable_spec()->add_argv("./train");
  job.mutable_spec()->set_min_processes(2);
  job.mutable_spec()->set_max_processes(2);
  job.set_owner("ann");
  job.set_state(state);
  job.set_sequence(sequence);
  job.set_revision(revision);
  return job;
}

}  // namespace muster::client

#endif  // MUSTER_CLIENT_JOBS_FAKE_JOB_SERVICE_H_
