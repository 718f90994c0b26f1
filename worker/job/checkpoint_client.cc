#include "worker/job/checkpoint_client.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "proto/checkpoint_verdict.h"
#include "proto/muster/v1/checkpoint.pb.h"
#include "rpc/status.h"

namespace muster {
namespace {

// The coordinator accepts 1 MiB at most.
constexpr size_t kMaxPartBytes = 768 << 10;

// After this many restarts of the coordinator during one report, something else must be wrong.
constexpr int kReportTries = 10;

// A coordinator that begins with a copy of its data, which may lack records, is this many terms
// ahead of the former one (ReplyHeader). For copies of older versions, which have drawn no
// restore_id.
constexpr uint64_t kTermsOfARestore = 65536;

RegisteredCheckpoint::State StateOf(v1::CheckpointState state) {
  switch (state) {
    case v1::CHECKPOINT_STATE_SEALED:
      return RegisteredCheckpoint::State::kSealed;
    case v1::CHECKPOINT_STATE_PUBLISHED:
      return RegisteredCheckpoint::State::kPublished;
    case v1::CHECKPOINT_STATE_DELETING:
      return RegisteredCheckpoint::State::kDeleting;
    default:
      return RegisteredCheckpoint::State::kPreparing;
  }
}

class CoordinatorRegistrar : public CheckpointRegistrar {
 public:
  explicit CoordinatorRegistrar(std::shared_ptr<CoordinatorClient> client)
      : client_(std::move(client)) {}

  std::string job() const override { return client_->job(); }
  std::string identity() const override {
    const MutexLock lock(&mu_);
    return identity_;
  }

  absl::StatusOr<uint64_t> Begin(const CheckpointRegistration& registration) override {
    absl::StatusOr<uint64_t> id = TryBegin(registration);
    if (rpc::GetReason(id.status()) != v1::ERROR_REASON_CHECKPOINT_CONFLICT) return id;
    // Only rank 0 of this generation begins checkpoints, one after another, so a registration in
    // the way was left over by a save that failed while the coordinator was away.
    MUSTER_ASSIGN_OR_RETURN(const std::vector<RegisteredCheckpoint> records, List());
    for (const RegisteredCheckpoint& record : records) {
      if (record.path != registration.path) continue;
      if (record.state == RegisteredCheckpoint::State::kPreparing) {
        Abort(record.id, "another save of this path begins");
      } else if (record.state == RegisteredCheckpoint::State::kDeleting) {
        // Whatever is at that path, the new checkpoint replaces it.
        MUSTER_RETURN_IF_ERROR(Deleted({record.id}));
      }
    }
    return TryBegin(registration);
  }

  absl::Status ReportShards(uint64_t id, int rank,
                            const std::vector<ShardFileReport>& files) override {
    for (int tries = 1;; ++tries) {
      const absl::Status status = TryReport(id, rank, files);
      // A coordinator that was restarted between two parts has forgotten the first.
      if (!RefusesThePart(status) || tries == kReportTries) return status;
      MUSTER_LOG(Info) << "reporting the files of checkpoint " << id
                       << " again: " << status.message();
    }
  }

  absl::StatusOr<std::optional<RegisteredCheckpoint>> Seal(uint64_t id) override {
    v1::SealCheckpointRequest request;
    request.set_checkpoint_id(id);
    request.set_created_unix_us(static_cast<uint64_t>(absl::ToUnixMicros(absl::Now())));
    v1::SealCheckpointReply reply;
    const absl::Status status = Call(&request, &reply);
    if (rpc::GetReason(status) == v1::ERROR_REASON_SHARDS_MISSING) return std::nullopt;
    if (rpc::GetReason(status) == v1::ERROR_REASON_NOT_COVERED) {
      return absl::InvalidArgumentError(status.message());
    }
    MUSTER_RETURN_IF_ERROR(status);
    return FromProto(reply.checkpoint());
  }

  absl::StatusOr<std::vector<RegisteredCheckpoint>> Publish(uint64_t id,
                                                            const SaveTimes& times) override {
    v1::PublishCheckpointRequest request;
    request.set_checkpoint_id(id);
    request.set_stall_us(absl::ToInt64Microseconds(times.stall));
    request.set_save_us(absl::ToInt64Microseconds(times.save));
    v1::PublishCheckpointReply reply;
    MUSTER_RETURN_IF_ERROR(Call(&request, &reply));
    std::vector<RegisteredCheckpoint> to_delete;
    for (const v1::CheckpointRecord& record : reply.to_delete()) {
      to_delete.push_back(FromProto(record));
    }
    return to_delete;
  }

  void CountUnrecorded(uint64_t bytes, const SaveTimes& times) override {
    v1::PublishCheckpointRequest request;
    request.set_stall_us(absl::ToInt64Microseconds(times.stall));
    request.set_save_us(absl::ToInt64Microseconds(times.save));
    request.set_bytes(bytes);
    v1::PublishCheckpointReply reply;
    const absl::Status told = Call(&request, &reply);
    // A coordinator older than this program knows no such checkpoints, or none at all.
    if (!told.ok() && !absl::IsUnimplemented(told) && !absl::IsNotFound(told)) {
      MUSTER_LOG(Info) << told.message();
    }
  }

  absl::Status Deleted(const std::vector<uint64_t>& ids) override {
    v1::CheckpointDeletedRequest request;
    for (const uint64_t id : ids) request.add_checkpoint_ids(id);
    v1::CheckpointDeletedReply reply;
    return Call(&request, &reply);
  }

  void Abort(uint64_t id, const std::string& reason) override {
    v1::AbortCheckpointRequest request;
    request.set_checkpoint_id(id);
    request.set_reason(OneLine(Utf8Prefix(reason, 1024)));
    v1::AbortCheckpointReply reply;
    const absl::Status aborted = Call(&request, &reply);
    if (!aborted.ok()) MUSTER_LOG(Info) << aborted.message();
  }

  void Verified(const RegisteredCheckpoint& checkpoint, absl::string_view damage,
                bool contents) override {
    v1::VerifyCheckpointRequest request =
        MakeVerdict(checkpoint.id, checkpoint.sha256, contents, damage);
    v1::VerifyCheckpointReply reply;
    const absl::Status told = Call(&request, &reply);
    // A coordinator older than this program keeps no verdicts.
    if (!told.ok() && !absl::IsUnimplemented(told)) MUSTER_LOG(Info) << told.message();
  }

  absl::Status Pin(uint64_t id) override { return Mark(id, v1::MarkCheckpointRequest::PIN); }
  absl::Status Unpin(uint64_t id) override { return Mark(id, v1::MarkCheckpointRequest::UNPIN); }

  absl::StatusOr<std::vector<RegisteredCheckpoint>> List() override {
    std::vector<RegisteredCheckpoint> records;
    v1::ListCheckpointsReply reply;
    do {
      v1::ListCheckpointsRequest request;
      request.set_after(records.empty() ? 0 : records.back().id);
      reply.Clear();
      MUSTER_RETURN_IF_ERROR(Call(&request, &reply));
      for (const v1::CheckpointRecord& record : reply.checkpoints()) {
        records.push_back(FromProto(record));
      }
    } while (reply.more() && reply.checkpoints_size() > 0);
    return records;
  }

 private:
  absl::StatusOr<uint64_t> TryBegin(const CheckpointRegistration& registration) {
    v1::BeginCheckpointRequest request;
    request.set_path(registration.path);
    request.set_staging(registration.staging);
    request.set_iteration(registration.iteration);
    request.set_step(registration.step);
    request.set_plan_digest(registration.plan);
    request.set_ranks(registration.ranks);
    request.set_keep(registration.keep);
    request.set_keep_every(registration.keep_every);
    request.set_hold_back(!registration.promote);
    v1::BeginCheckpointReply reply;
    MUSTER_RETURN_IF_ERROR(Call(&request, &reply));
    return reply.checkpoint_id();
  }

  // Whether the coordinator waits for an earlier part.
  static bool RefusesThePart(const absl::Status& status) {
    const std::optional<v1::ErrorDetail> detail = rpc::GetDetail(status);
    return detail.has_value() && detail->reason() == v1::ERROR_REASON_BAD_FIELD &&
           detail->field() == "part";
  }

  absl::Status TryReport(uint64_t id, int rank, const std::vector<ShardFileReport>& files) {
    v1::ReportShardsRequest request;
    request.set_checkpoint_id(id);
    request.set_rank(rank);
    size_t bytes = 0;
    const auto send = [&](bool last) -> absl::Status {
      request.set_last(last);
      v1::ReportShardsReply reply;
      MUSTER_RETURN_IF_ERROR(Call(&request, &reply));
      request.set_part(request.part() + 1);
      request.clear_files();
      bytes = 0;
      return absl::OkStatus();
    };
    for (const ShardFileReport& file : files) {
      v1::ShardFile message;
      message.set_name(file.name);
      message.set_bytes(file.bytes);
      message.set_xxh3(file.xxh3);
      for (const ShardSlice& slice : file.slices) {
        v1::TensorSlice& added = *message.add_slices();
        added.set_tensor(slice.tensor);
        added.set_dtype(slice.dtype);
        added.mutable_global_shape()->Add(slice.global_shape.begin(), slice.global_shape.end());
        added.mutable_offset()->Add(slice.offset.begin(), slice.offset.end());
        added.mutable_extent()->Add(slice.extent.begin(), slice.extent.end());
      }
      // A file is named in one part only: one with too many tensors for a part goes without them,
      // and its digest represents them.
      if (message.ByteSizeLong() > kMaxPartBytes) message.clear_slices();
      const size_t more = message.ByteSizeLong() + 16;
      if (bytes > 0 && bytes + more > kMaxPartBytes) MUSTER_RETURN_IF_ERROR(send(/*last=*/false));
      bytes += more;
      *request.add_files() = std::move(message);
    }
    return send(/*last=*/true);
  }

  absl::Status Mark(uint64_t id, v1::MarkCheckpointRequest::Mark mark) {
    v1::MarkCheckpointRequest request;
    request.set_checkpoint_id(id);
    request.set_mark(mark);
    v1::MarkCheckpointReply reply;
    return Call(&request, &reply);
  }

  template <typename Request, typename Reply>
  absl::Status Call(Request* request, Reply* reply) {
    MUSTER_RETURN_IF_ERROR(client_->CallCheckpoints(request, reply));
    const v1::ReplyHeader& header = reply->header();
    if (header.cluster_id().empty()) return absl::OkStatus();
    const MutexLock lock(&mu_);
    identity_ = header.restore_id() != 0
                    ? absl::StrCat(header.cluster_id(), "/", absl::Hex(header.restore_id()))
                    : absl::StrCat(header.cluster_id(), "/", header.term() / kTermsOfARestore);
    return absl::OkStatus();
  }

  RegisteredCheckpoint FromProto(const v1::CheckpointRecord& record) const {
    return {
        .job = record.job_id().empty() ? client_->job() : record.job_id(),
        .id = record.checkpoint_id(),
        .state = StateOf(record.state()),
        .path = record.path(),
        .staging = record.staging(),
        .iteration = record.iteration(),
        .step = record.step(),
        .plan = record.plan_digest(),
        .ranks = record.ranks(),
        .promoted = record.promoted(),
        .pinned = record.pinned(),
        .published = record.published(),
        .damage = record.damage(),
        .damage_in_contents = !record.damage().empty() && record.verified() == v1::VERIFY_CONTENTS,
        .created_us = record.created_unix_us(),
        .files = record.files(),
        .bytes = record.bytes(),
        .files_sha256 = absl::BytesToHexString(record.files_sha256()),
        .previous_sha256 = absl::BytesToHexString(record.previous_sha256()),
        .sha256 = absl::BytesToHexString(record.sha256()),
        .signature = absl::BytesToHexString(record.signature())};
  }

  const std::shared_ptr<CoordinatorClient> client_;
  mutable Mutex mu_;
  std::string identity_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::unique_ptr<CheckpointRegistrar> MakeCoordinatorRegistrar(
    std::shared_ptr<CoordinatorClient> client) {
  return std::make_unique<CoordinatorRegistrar>(std::move(client));
}

}  // namespace muster
