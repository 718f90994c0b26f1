#include "coordinator/service/watch_source.h"

#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"
#include "rpc/status.h"

namespace muster::coordinator {
namespace {

using Message = std::unique_ptr<google::protobuf::MessageLite>;

constexpr size_t kReadBytes = 256 << 10;
constexpr uint64_t kRevisionsBetweenProgress = 1024;

class EventsSource final : public WatchSource {
 public:
  explicit EventsSource(v1::WatchRequest request)
      : request_(std::move(request)),
        topic_{WatchTopic::kGroup, request_.job_id()},
        next_(request_.from_revision()) {}

  const WatchTopic& topic() const override { return topic_; }

  absl::StatusOr<Message> Next(const Core& core, uint64_t durable_revision,
                               size_t max_bytes) override {
    auto batch = std::make_unique<v1::WatchBatch>();
    const std::optional<v1::OpError> error =
        core.ReadWatch(request_, next_, durable_revision, kReadBytes, batch.get());
    if (error.has_value()) return rpc::FromOpError(*error);
    if (const size_t bytes = batch->ByteSizeLong(); bytes > max_bytes) {
      // One revision can be larger than a message: treat it as if it were no longer kept.
      v1::OpError too_large = MakeError(
          absl::StatusCode::kOutOfRange, v1::ERROR_REASON_COMPACTED,
          absl::StrCat("the next revision has ", bytes, " bytes of events, more than a message ",
                       "may have: read the keys again and watch from the revision of that reply"));
      too_large.mutable_detail()->set_compacted_revision(batch->next_revision() - 1);
      return rpc::FromOpError(too_large);
    }
    next_ = batch->next_revision();
    // The first batch is sent even if empty: it gives the watcher the revision from which it sees
    // everything. An empty one is also sent occasionally: otherwise a watcher of rarely changing
    // keys would resume from a revision that is no longer kept.
    if (batch->events_size() == 0 && greeted_ && next_ - told_ < kRevisionsBetweenProgress) {
      return nullptr;
    }
    greeted_ = true;
    told_ = next_;
    *batch->mutable_header() = core.Header();
    return batch;
  }

 private:
  const v1::WatchRequest request_;
  const WatchTopic topic_;
  uint64_t next_;
  uint64_t told_ = 0;  // the `next_` that the watcher knows
  bool greeted_ = false;
};

class JobsSource final : public WatchSource {
 public:
  JobsSource(v1::WatchJobsRequest request, std::shared_ptr<const Identity> who)
      : request_(std::move(request)),
        topic_{WatchTopic::kSubmitted, request_.job_id()},
        who_(std::move(who)),
        place_{.seen = request_.seen_revision()} {}

  const WatchTopic& topic() const override { return topic_; }

  absl::StatusOr<Message> Next(const Core& core, uint64_t durable_revision,
                               size_t max_bytes) override {
    auto batch = std::make_unique<v1::WatchJobsBatch>();
    const std::optional<v1::OpError> error =
        core.ReadJobs(request_, who_.get(), durable_revision, std::min(kReadBytes, max_bytes),
                      &place_, batch.get());
    if (error.has_value()) return rpc::FromOpError(*error);
    const bool empty = batch->jobs_size() == 0 && batch->gone_size() == 0 && !batch->lists_kept();
    if (empty && greeted_ && !batch->more()) return nullptr;
    if (const size_t bytes = batch->ByteSizeLong(); bytes > max_bytes) {
      return rpc::ErrorWithReason(
          absl::StatusCode::kResourceExhausted,
          absl::StrCat("the next message has ", bytes,
                       " bytes, more than a message may have: ", "watch fewer jobs"),
          v1::ERROR_REASON_LIMIT);
    }
    greeted_ = true;
    return batch;
  }

 private:
  const v1::WatchJobsRequest request_;
  const WatchTopic topic_;
  const std::shared_ptr<const Identity> who_;
  JobsCore::WatchPlace place_;
  bool greeted_ = false;
};

}  // namespace

std::unique_ptr<WatchSource> WatchEvents(v1::WatchRequest request) {
  return std::make_unique<EventsSource>(std::move(request));
}

std::unique_ptr<WatchSource> WatchJobs(v1::WatchJobsRequest request,
                                       std::shared_ptr<const Identity> who) {
  return std::make_unique<JobsSource>(std::move(request), std::move(who));
}

}  // namespace muster::coordinator
