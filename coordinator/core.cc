#include "coordinator/core.h"

#include <utility>

namespace muster::coordinator {

Answer::Answer(v1::OpResult result, bool shared)
    : result_(std::move(result)), shared_(shared), bytes_(shared ? result_.SerializeAsString() : "") {}

void Output::Clear() { *this = Output(); }

class Core::Impl {
 public:
  explicit Impl(CoreOptions options) : options_(std::move(options)) {}
  CoreOptions options_;
  CoreStats stats_;
  uint64_t term_ = 0;
  uint64_t revision_ = 0;
  uint64_t last_record_ = 0;
};

Core::Core(CoreOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Core::~Core() = default;

void Core::Handle(CallId call, const v1::Op&, const Caller&, absl::Time, Output* out) {
  v1::OpResult result;
  result.mutable_error()->set_code(12);
  result.mutable_error()->set_message("this operation is not served yet");
  out->replies.push_back({call, std::make_shared<Answer>(std::move(result), false), 0});
}
void Core::Abandon(CallId, absl::Time, Output*) {}
void Core::AttachAgent(absl::string_view, const v1::Hello&, absl::Time, Output*) {}
void Core::DetachAgent(absl::string_view, absl::Time, Output*) {}
void Core::HandleBeat(absl::string_view, const v1::Beat&, absl::Time, Output*) {}
void Core::HandleStack(absl::string_view, const v1::StackReply&, absl::Time, Output*) {}
void Core::Tick(absl::Time, Output*) {}
absl::Time Core::NextDeadline() const { return absl::InfiniteFuture(); }
absl::Status Core::Restore(absl::string_view) { return absl::OkStatus(); }
absl::Status Core::Replay(absl::string_view) { return absl::OkStatus(); }
std::string Core::Snapshot() const { return ""; }
void Core::StartTerm(uint64_t term, absl::Time, Output*) { impl_->term_ = term; }
uint64_t Core::last_term() const { return impl_->term_; }
uint64_t Core::revision() const { return impl_->revision_; }
uint64_t Core::last_record_revision() const { return impl_->last_record_; }
void Core::CloseJob(absl::string_view, absl::string_view, absl::Time, Output*) {}
void Core::RemoveJob(absl::string_view, absl::Time, Output*) {}
std::optional<v1::OpError> Core::ReadWatch(const v1::WatchRequest&, uint64_t, uint64_t, size_t,
                                           v1::WatchBatch*) const {
  return std::nullopt;
}
void Core::FillStatus(v1::StatusReply* status) const { *status->mutable_header() = Header(); }
v1::ReplyHeader Core::Header() const {
  v1::ReplyHeader header;
  header.set_cluster_id(impl_->options_.cluster_id);
  header.set_term(impl_->term_);
  header.set_revision(impl_->revision_);
  return header;
}
const CoreStats& Core::stats() const { return impl_->stats_; }
std::map<v1::WorkerState, int64_t> Core::MembersByState() const { return {}; }

}  // namespace muster::coordinator
