#include "coordinator/service/watchers.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "coordinator/errors.h"
#include "rpc/status.h"

namespace muster::coordinator {
namespace {

constexpr size_t kReadBytes = 256 << 10;
constexpr uint64_t kRevisionsBetweenProgress = 1024;

}  // namespace

void Watchers::Open(std::shared_ptr<WatchStream> stream, v1::WatchRequest request) {
  const std::string job_id = request.job_id();
  Watcher& watcher = watchers_[stream.get()];
  watcher.next = request.from_revision();
  watcher.request = std::move(request);
  of_job_[job_id].insert(stream.get());
  watcher.stream = std::move(stream);
  count_.store(watchers_.size(), std::memory_order_relaxed);
  Send(watcher);
  Changed(job_id);
}

void Watchers::Writable(const std::shared_ptr<WatchStream>& stream) {
  const auto it = watchers_.find(stream.get());
  if (it == watchers_.end()) return;
  it->second.writing = false;
  Send(it->second);
}

void Watchers::Forget(WatchStream* stream) {
  const auto it = watchers_.find(stream);
  if (it == watchers_.end()) return;
  const auto of = of_job_.find(it->second.request.job_id());
  of->second.erase(stream);
  if (of->second.empty()) of_job_.erase(of);
  watchers_.erase(it);
  count_.store(watchers_.size(), std::memory_order_relaxed);
}

void Watchers::CloseAll(const absl::Status& status) {
  for (const auto& [raw, watcher] : watchers_) watcher.stream->Close(status);
  watchers_.clear();
  of_job_.clear();
  changed_.clear();
  undurable_.clear();
}

void Watchers::Changed(const std::string& job_id) {
  if (!of_job_.contains(job_id)) return;
  changed_.push_back(job_id);
  const uint64_t revision = core_.last_record_revision();
  if (revision > durable_revision_) undurable_.emplace(revision, job_id);
}

void Watchers::Durable(uint64_t revision) {
  durable_revision_ = revision;
  while (!undurable_.empty() && undurable_.begin()->first <= durable_revision_) {
    changed_.push_back(undurable_.begin()->second);
    undurable_.erase(undurable_.begin());
  }
}

void Watchers::Send(Watcher& watcher) {
  if (watcher.writing) return;
  v1::WatchBatch batch;
  const std::optional<v1::OpError> error =
      core_.ReadWatch(watcher.request, watcher.next, durable_revision_, kReadBytes, &batch);
  if (error.has_value()) {
    watcher.writing = true;  // nothing more is written
    watcher.stream->Close(rpc::FromOpError(*error));
    return;
  }
  if (const size_t bytes = batch.ByteSizeLong(); bytes > batch_bytes_) {
    // One revision can be larger than a message: as if it were no longer kept.
    v1::OpError too_large = MakeError(
        absl::StatusCode::kOutOfRange, v1::ERROR_REASON_COMPACTED,
        absl::StrCat("the next revision has ", bytes, " bytes of events, more than a message may ",
                     "have: read the keys again and watch from the revision of that reply"));
    too_large.mutable_detail()->set_compacted_revision(batch.next_revision() - 1);
    watcher.writing = true;
    watcher.stream->Close(rpc::FromOpError(too_large));
    return;
  }
  watcher.next = batch.next_revision();
  // The first batch is sent even if empty: it gives the watcher the revision from which it sees
  // everything. An empty one is also sent occasionally: otherwise a watcher of rarely changing keys
  // would resume from a revision that is no longer kept.
  if (batch.events_size() == 0 && watcher.greeted &&
      watcher.next - watcher.told < kRevisionsBetweenProgress)
    return;
  watcher.greeted = true;
  watcher.told = watcher.next;
  watcher.writing = true;
  *batch.mutable_header() = core_.Header();
  MUSTER_FAILPOINT("engine.watch_push");
  watcher.stream->Write(std::move(batch));
}

void Watchers::Serve() {
  if (changed_.empty()) return;
  std::sort(changed_.begin(), changed_.end());
  changed_.erase(std::unique(changed_.begin(), changed_.end()), changed_.end());
  for (const std::string& job_id : changed_) {
    const auto of = of_job_.find(job_id);
    if (of == of_job_.end()) continue;
    visited_.fetch_add(of->second.size(), std::memory_order_relaxed);
    for (WatchStream* const stream : of->second) Send(watchers_.find(stream)->second);
  }
  changed_.clear();
}

}  // namespace muster::coordinator
