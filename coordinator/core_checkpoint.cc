#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/core_impl.h"
#include "coordinator/errors.h"

// The operations on checkpoints: checkpoint/checkpoint_set.h decides, this file journals and
// answers.

namespace muster::coordinator {

std::optional<v1::OpError> Core::Impl::Job::CheckpointOp(const v1::Op& op, const Seat* seat,
                                                         v1::OpResult* result) {
  CheckpointSet::Changes changes;
  std::optional<v1::OpError> error;
  v1::ReplyHeader* header = nullptr;
  switch (op.kind_case()) {
    case v1::Op::kBeginCheckpoint:
      header = result->mutable_begin_checkpoint()->mutable_header();
      if (op.begin_checkpoint().ranks() > members_.size()) {
        error = BadField("ranks", absl::StrCat("ranks is ", op.begin_checkpoint().ranks(),
                                               ": this generation has ", members_.size()));
        break;
      }
      // A revision is never given out twice: it is the id too.
      error = checkpoints_.Begin(
          op.begin_checkpoint(), members_.generation(),
          impl_->event_revision_ != 0 ? impl_->event_revision_ : impl_->revision_ + 1,
          result->mutable_begin_checkpoint(), &changes);
      break;
    case v1::Op::kReportShards:
      header = result->mutable_report_shards()->mutable_header();
      if (seat == nullptr || seat->rank() != op.report_shards().rank()) {
        error = BadField(
            "rank", absl::StrCat("worker ", Quoted(op.report_shards().fence().worker_id()),
                                 " holds rank ", seat == nullptr ? -1 : seat->rank(), ", not ",
                                 op.report_shards().rank(), ": a rank reports its own shards"));
        break;
      }
      error = checkpoints_.Report(op.report_shards());
      break;
    case v1::Op::kSealCheckpoint:
      header = result->mutable_seal_checkpoint()->mutable_header();
      error = checkpoints_.Seal(op.seal_checkpoint(), result->mutable_seal_checkpoint(), &changes);
      break;
    case v1::Op::kPublishCheckpoint:
      header = result->mutable_publish_checkpoint()->mutable_header();
      if (op.publish_checkpoint().checkpoint_id() == 0) {
        CountPublished(op.publish_checkpoint().bytes(), op.publish_checkpoint().stall_us(),
                       op.publish_checkpoint().save_us());
        break;
      }
      error = checkpoints_.Publish(op.publish_checkpoint(), result->mutable_publish_checkpoint(),
                                   &changes);
      break;
    case v1::Op::kAbortCheckpoint:
      header = result->mutable_abort_checkpoint()->mutable_header();
      error = checkpoints_.Abort(op.abort_checkpoint().checkpoint_id(), &changes);
      break;
    case v1::Op::kCheckpointDeleted:
      header = result->mutable_checkpoint_deleted()->mutable_header();
      error = checkpoints_.Deleted(op.checkpoint_deleted(), &changes);
      break;
    case v1::Op::kMarkCheckpoint:
      header = result->mutable_mark_checkpoint()->mutable_header();
      error = checkpoints_.Mark(op.mark_checkpoint(), result->mutable_mark_checkpoint(), &changes);
      break;
    case v1::Op::kVerifyCheckpoint:
      header = result->mutable_verify_checkpoint()->mutable_header();
      error = checkpoints_.Verify(op.verify_checkpoint(), result->mutable_verify_checkpoint(),
                                  &changes);
      break;
    case v1::Op::kCollectCheckpoints:
      header = result->mutable_collect_checkpoints()->mutable_header();
      error = checkpoints_.Collect(op.collect_checkpoints(), result->mutable_collect_checkpoints(),
                                   &changes);
      break;
    case v1::Op::kResolveCheckpoint:
      header = result->mutable_resolve_checkpoint()->mutable_header();
      error = checkpoints_.Resolve(op.resolve_checkpoint(), result->mutable_resolve_checkpoint());
      break;
    case v1::Op::kListCheckpoints:
      header = result->mutable_list_checkpoints()->mutable_header();
      checkpoints_.List(op.list_checkpoints(), result->mutable_list_checkpoints());
      break;
    default:
      return BadField("kind", "this is not an operation on checkpoints");
  }
  if (error.has_value()) return error;
  CountCheckpoint(op, changes);
  CheckpointsChanged(std::move(changes));
  *header = impl_->Header();
  return std::nullopt;
}

void Core::Impl::Job::CountCheckpoint(const v1::Op& op, const CheckpointSet::Changes& changes) {
  if (changes.empty()) return;  // a repeat
  CoreStats& stats = impl_->stats_;
  const v1::CheckpointRecord& record = changes.front().record();
  if (op.has_publish_checkpoint() &&
      record.checkpoint_id() == op.publish_checkpoint().checkpoint_id()) {
    CountPublished(record.bytes(), record.stall_us(), record.save_us());
  } else if (op.has_abort_checkpoint()) {
    ++stats.checkpoints_given_up;
  } else if (op.has_verify_checkpoint() && !record.damage().empty()) {
    ++stats.checkpoints_damaged;
  }
}

void Core::Impl::Job::CountPublished(uint64_t bytes, int64_t stall_us, int64_t save_us) {
  CoreStats& stats = impl_->stats_;
  ++stats.checkpoints_published;
  stats.checkpoint_bytes += bytes;
  if (save_us <= 0) return;
  stats.checkpoint_stall.Observe(static_cast<double>(std::max<int64_t>(stall_us, 0)) / 1e6);
  stats.checkpoint_save.Observe(static_cast<double>(save_us) / 1e6);
}

void Core::Impl::LeaveCheckpoints(Job* former) {
  left_checkpoints_ = std::make_unique<CheckpointSet>(std::move(former->checkpoints()));
  left_by_ = former->id();
}

void Core::Impl::AdoptCheckpoints(Job* job) {
  if (left_checkpoints_ != nullptr && left_by_ == job->id()) {
    job->checkpoints().Adopt(left_checkpoints_.get());
  }
  left_checkpoints_.reset();
}

void Core::Impl::Job::CheckpointsChanged(std::vector<v1::CheckpointChanged> changes) {
  if (changes.empty()) return;
  impl_->Rev();
  membership_touched_ = true;
  for (v1::CheckpointChanged& change : changes) {
    *impl_->Change()->mutable_checkpoint_changed() = std::move(change);
  }
}

}  // namespace muster::coordinator
