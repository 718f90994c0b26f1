#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "coordinator/core_impl.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

// More generations of a job, and more writes of a key, than a lost part of the history can have.
// The term comes on top, so that two restores of one copy do not share numbers.
constexpr uint64_t kLostGenerations = 65536;
constexpr uint64_t kLostVersions = uint64_t{1} << 32;

// The keys of one change: a part is divided between changes only.
constexpr size_t kKeysBytes = 256 << 10;
constexpr int kKeys = 1000;

// The most strikes of one host for which an older coordinator has written only their number.
constexpr int kMaxStrikes = 1024;
// The part size of a snapshot in one string.
constexpr size_t kPartBytes = 2 << 20;

}  // namespace

// Divides the changes of a snapshot into parts.
class Core::Impl::SnapshotParts {
 public:
  SnapshotParts(const Impl& core, size_t part_bytes,
                absl::FunctionRef<absl::Status(std::string)> part);

  // Returns the next change. Valid until the next call.
  v1::JournalChange* Add() {
    Count();
    if (bytes_ >= part_bytes_) Flush();
    change_ = snapshot_.add_changes();
    return change_;
  }
  const absl::Status& status() const { return status_; }
  absl::Status Finish() {
    Count();
    // The state of no jobs is a part too.
    if (!flushed_ || bytes_ > 0) Flush();
    return status_;
  }

 private:
  void Count() {
    if (change_ != nullptr) bytes_ += change_->ByteSizeLong();
    change_ = nullptr;
  }
  void Flush() {
    if (status_.ok()) status_ = part_(snapshot_.SerializeAsString());
    snapshot_.clear_changes();
    bytes_ = 0;
    flushed_ = true;
  }

  const size_t part_bytes_;
  const absl::FunctionRef<absl::Status(std::string)> part_;
  v1::CoordinatorSnapshot snapshot_;
  v1::JournalChange* change_ = nullptr;  // not counted yet
  size_t bytes_ = 0;
  bool flushed_ = false;
  absl::Status status_;
};

void Core::Impl::Job::BecomeRestored() {
  // The current seats are unknown. Every returning worker must join again, including a newer start
  // of the worker seated here, which must not be mistaken for an older one.
  for (const Seat& seat : members_.seats())
    incarnations_.Depart(seat.record().worker_id(), seat.record().incarnation());
  barriers_.reset();
  agree_.reset();
  std::vector<KvChange> changes;
  kv_.DropPrefix(absl::StrCat("gen/", members_.generation(), "/"), &changes);
  const uint64_t term = impl_->restored_term_;
  kv_.RaiseVersions((term + 1) * kLostVersions);
  members_.BecomeRestored(kLostGenerations + term);
  leases_.BeginGeneration(impl_->now_);
  triggers_.Clear();
  triggers_.RestoreGeneration(0);
}

void Core::Impl::BecomeRestored(uint64_t term) {
  restored_term_ = term;
  for (auto& [id, job] : jobs_) job->BecomeRestored();
}

std::vector<const Core::Impl::Job*> Core::Impl::JobsById() const {
  std::vector<const Job*> jobs;
  for (const auto& [id, job] : jobs_) jobs.push_back(job.get());
  std::sort(jobs.begin(), jobs.end(), [](const Job* a, const Job* b) { return a->id() < b->id(); });
  return jobs;
}

void Core::Impl::Job::SnapshotTo(SnapshotParts* parts) const {
  const auto add = [&] { return parts->Add(); };
  v1::JobCreated* created = add()->mutable_job_created();
  created->set_job_id(id_);
  *created->mutable_spec() = spec_;
  if (!HasSealed()) created->set_generation(members_.generation());
  incarnations_.ForEachFenced([&](const std::string& worker_id, uint64_t incarnation) {
    v1::IncarnationFenced* fenced = add()->mutable_incarnation_fenced();
    fenced->set_job_id(id_);
    fenced->set_worker_id(worker_id);
    fenced->set_incarnation(incarnation);
  });
  if (HasSealed()) SnapshotGenerationTo(parts);
  incarnations_.ForEachDeparted([&](const std::string& worker_id, uint64_t incarnation) {
    v1::WorkerDeparted* departed = add()->mutable_worker_departed();
    departed->set_job_id(id_);
    departed->set_worker_id(worker_id);
    departed->set_incarnation(incarnation);
  });
  if (members_.closed()) {
    v1::JobClosed* closed = add()->mutable_job_closed();
    closed->set_job_id(id_);
    closed->set_why(members_.why_ended());
  }
  v1::KvChanged* kv = nullptr;
  size_t kv_bytes = 0;
  kv_.ForEachDurable([&](const KvEntry& entry) {
    if (kv == nullptr || kv->puts_size() >= kKeys || kv_bytes >= kKeysBytes) {
      kv = add()->mutable_kv_changed();
      kv->set_job_id(id_);
      kv_bytes = 0;
    }
    entry.CopyTo(kv->add_puts());
    kv_bytes += entry.bytes();
  });
  triggers_.ForEach([&](const v1::TriggerRecord& record, const std::vector<bool>& acked_by) {
    v1::TriggerChanged* trigger = add()->mutable_trigger_changed();
    trigger->set_job_id(id_);
    *trigger->mutable_trigger() = record;
    v1::TriggerAcked* acked = nullptr;
    for (size_t rank = 0; rank < acked_by.size(); ++rank) {
      if (!acked_by[rank]) continue;
      if (acked == nullptr) {
        acked = add()->mutable_trigger_acked();
        acked->set_job_id(id_);
        acked->set_trigger_id(record.trigger_id());
      }
      acked->add_ranks(static_cast<int>(rank));
    }
  });
  checkpoints_.ForEach([&](const v1::CheckpointChanged& checkpoint) {
    *add()->mutable_checkpoint_changed() = checkpoint;
  });
  SnapshotHostsTo(parts);
  SnapshotAnswersTo(parts);
}

void Core::Impl::Job::SnapshotGenerationTo(SnapshotParts* parts) const {
  const auto add = [&] { return parts->Add(); };
  v1::GenerationSealed* sealed = add()->mutable_generation_sealed();
  sealed->set_job_id(id_);
  members_.Fill(sealed);
  if (!members_.sealed()) {
    v1::GenerationClosed* ended = add()->mutable_generation_closed();
    ended->set_job_id(id_);
    members_.Fill(ended);
  }
  const auto end = [&](const std::string& id, uint64_t counter, const Answer& answer) {
    v1::BarrierEnded* ended = add()->mutable_barrier_ended();
    ended->set_job_id(id_);
    ended->set_generation(members_.generation());
    ended->set_barrier_id(id);
    ended->set_counter(counter);
    *ended->mutable_answer() = answer.Parse();
  };
  // A repeated arrival in an ended generation gets that error, so no caller needs the payloads any
  // longer. Failures are kept for status queries.
  barriers_->ForEachJournaled([&](const std::string& id, uint64_t counter, const Answer& answer) {
    if (members_.sealed() || answer.kind() == v1::OpResult::KIND_NOT_SET) end(id, counter, answer);
  });
  if (members_.sealed()) {
    agree_->ForEachKept([&](uint64_t counter, const Answer& answer) { end("", counter, answer); });
  }
}

v1::RequestsForgotten Core::Impl::Job::Forgotten(const std::string& worker_id, uint64_t incarnation,
                                                 uint64_t up_to) const {
  v1::RequestsForgotten forgotten;
  forgotten.set_job_id(id_);
  forgotten.set_worker_id(worker_id);
  forgotten.set_incarnation(incarnation);
  forgotten.set_up_to(up_to);
  return forgotten;
}

void Core::Impl::Job::SnapshotAnswersTo(SnapshotParts* parts) const {
  answers_.ForEachForgotten(
      [&](const std::string& worker_id, uint64_t incarnation, uint64_t up_to) {
        *parts->Add()->mutable_requests_forgotten() = Forgotten(worker_id, incarnation, up_to);
      });
  answers_.ForEach([&](const std::string& worker_id, uint64_t incarnation, uint64_t request_id,
                       uint64_t hash, const StoredAnswer& stored) {
    if (stored.durable_revision == 0) return;
    v1::RequestAnswered* answered = parts->Add()->mutable_request_answered();
    answered->set_job_id(id_);
    answered->set_worker_id(worker_id);
    answered->set_incarnation(incarnation);
    answered->set_request_id(request_id);
    answered->set_request_hash(hash);
    *answered->mutable_answer() = stored.answer->Parse();
  });
}

void Core::Impl::Job::SetStrikes(const std::vector<absl::Time>& strikes, v1::HostStruck* struck) {
  struck->set_strikes(static_cast<int>(strikes.size()));
  for (const absl::Time at : strikes) {
    if (at != absl::InfiniteFuture()) struck->add_at_unix_ms(absl::ToUnixMillis(at));
  }
}

void Core::Impl::Job::SnapshotHostsTo(SnapshotParts* parts) const {
  quarantine_.ForEach(impl_->now_, [&](const std::string& name, const Quarantine::Host& host) {
    if (!host.strikes.empty()) {
      v1::HostStruck* struck = parts->Add()->mutable_host_struck();
      struck->set_job_id(id_);
      struck->set_host(name);
      SetStrikes(host.strikes, struck);
    }
    if (host.left > absl::ZeroDuration()) {
      v1::HostQuarantined* quarantined = parts->Add()->mutable_host_quarantined();
      quarantined->set_job_id(id_);
      quarantined->set_host(name);
      *quarantined->mutable_for_() = ToProto(host.left);
      if (host.until != absl::InfiniteFuture()) {
        quarantined->set_until_unix_ms(absl::ToUnixMillis(host.until));
      }
      quarantined->set_reason(host.reason);
      quarantined->set_automatic(host.automatic);
    }
  });
}

absl::Status Core::Impl::Job::Apply(const v1::JobClosed& closed) {
  members_.Close(closed.why());
  return absl::OkStatus();
}

absl::Status Core::Impl::Job::Apply(const v1::GenerationSealed& sealed) {
  std::vector<Seat> old_seats;
  if (absl::Status status = members_.Restore(sealed, &old_seats); !status.ok()) return status;
  BeginGeneration(false);
  NoteDeparted(old_seats);
  triggers_.RestoreGeneration(sealed.seats_size());
  return absl::OkStatus();
}

absl::Status Core::Impl::Job::Apply(const v1::GenerationClosed& ended) {
  members_.Restore(ended);
  leases_.EndGeneration();
  if (barriers_ != nullptr) barriers_->DropPayloads();
  return absl::OkStatus();
}

absl::Status Core::Impl::Job::Apply(const v1::SeatTaken& taken) {
  if (absl::Status status = members_.Restore(taken); !status.ok()) return status;
  triggers_.RankReplaced(taken.seat().rank());
  return absl::OkStatus();
}

absl::Status Core::Impl::Job::Apply(const v1::WorkerEnded& ended) {
  members_.Restore(ended);
  return absl::OkStatus();
}

absl::Status Core::Impl::Job::Apply(const v1::IncarnationFenced& fenced) {
  RememberFenced(fenced.worker_id(), fenced.incarnation());
  return absl::OkStatus();
}

absl::Status Core::Impl::Job::Apply(const v1::WorkerDeparted& departed) {
  incarnations_.Depart(departed.worker_id(), departed.incarnation());
  return absl::OkStatus();
}

absl::Status Core::Impl::Job::Apply(const v1::KvChanged& kv) {
  for (const v1::KeyValue& put : kv.puts()) kv_.RestorePut(put);
  for (const std::string& key : kv.deletes()) kv_.RestoreDelete(key);
  return absl::OkStatus();
}

absl::Status Core::Impl::Job::Apply(const v1::TriggerChanged& change) {
  triggers_.Restore(change);
  return absl::OkStatus();
}

absl::Status Core::Impl::Job::Apply(const v1::TriggerAcked& acked) {
  for (const int rank : acked.ranks()) triggers_.RestoreAck(acked.trigger_id(), rank);
  return absl::OkStatus();
}

absl::Status Core::Impl::Job::Apply(const v1::CheckpointChanged& checkpoint) {
  checkpoints_.Restore(checkpoint);
  return absl::OkStatus();
}

absl::Status Core::Impl::Job::Apply(const v1::BarrierEnded& ended) {
  if (barriers_ == nullptr || ended.generation() != members_.generation()) return absl::OkStatus();
  // The empty name denotes agreements.
  if (ended.barrier_id().empty()) {
    agree_->Restore(ended.counter(), ended.answer());
  } else {
    barriers_->RestoreEnd(ended.barrier_id(), ended.counter(), ended.answer());
  }
  return absl::OkStatus();
}

absl::Status Core::Impl::Job::Apply(const v1::HostStruck& struck) {
  std::vector<absl::Time> strikes;
  for (const int64_t at : struck.at_unix_ms()) strikes.push_back(absl::FromUnixMillis(at));
  // An older coordinator wrote only the number. The missing times count as newer than the term's
  // start.
  const int all = std::min(struck.strikes(), kMaxStrikes);
  if (struck.at_unix_ms_size() < all) strikes.resize(all, absl::InfiniteFuture());
  quarantine_.RestoreStrikes(struck.host(), std::move(strikes));
  return absl::OkStatus();
}

absl::Status Core::Impl::Job::Apply(const v1::HostQuarantined& quarantined) {
  quarantine_.RestoreSet(quarantined.host(), FromProto(quarantined.for_()),
                         quarantined.until_unix_ms() == 0
                             ? absl::InfiniteFuture()
                             : absl::FromUnixMillis(quarantined.until_unix_ms()),
                         quarantined.reason(), quarantined.automatic());
  return absl::OkStatus();
}

absl::Status Core::Impl::Job::Apply(const v1::RequestAnswered& answered) {
  answers_.Remember(
      answered.worker_id(), answered.incarnation(), answered.request_id(), answered.request_hash(),
      {std::make_shared<Answer>(answered.answer()), std::max<uint64_t>(1, impl_->last_record_)});
  if (answered.forgotten() > 0) {
    answers_.NoteForgotten(answered.worker_id(), answered.incarnation(), answered.forgotten());
  }
  return absl::OkStatus();
}

absl::Status Core::Impl::Job::Apply(const v1::RequestsForgotten& forgotten) {
  if (impl_->restoring_) {  // a snapshot, which lists what is kept
    answers_.NoteForgotten(forgotten.worker_id(), forgotten.incarnation(), forgotten.up_to());
  } else {
    answers_.RememberForgotten(forgotten.worker_id(), forgotten.incarnation(), forgotten.up_to());
  }
  return absl::OkStatus();
}

template <typename Message>
absl::Status Core::Impl::ApplyToJob(const Message& change) {
  Job* const job = FindJob(change.job_id());
  if (job == nullptr) {
    return absl::DataLossError(
        absl::StrCat("the journal names job ", Quoted(change.job_id()), " before it was created"));
  }
  return job->Apply(change);
}

absl::Status Core::Impl::ApplyChange(const v1::JournalChange& change) {
  switch (change.kind_case()) {
    case v1::JournalChange::kTermStarted:
      if (change.term_started().term() <= term_) {
        return absl::DataLossError(absl::StrCat(
            "the journal begins term ", change.term_started().term(), " after term ", term_));
      }
      term_ = change.term_started().term();
      return absl::OkStatus();
    case v1::JournalChange::kJobCreated: {
      const v1::JobCreated& created = change.job_created();
      auto job = std::make_unique<Job>(this, created.job_id());
      job->Begin(created.spec(), created.generation());
      AdoptCheckpoints(job.get());
      if (Job* const earlier = FindJob(created.takes_checkpoints_of()); earlier != nullptr) {
        job->checkpoints().Adopt(&earlier->checkpoints());
      }
      jobs_[created.job_id()] = std::move(job);
      return absl::OkStatus();
    }
    case v1::JournalChange::kJobRemoved:
      if (change.job_removed().keeps_checkpoints()) {
        if (Job* const former = FindJob(change.job_removed().job_id()); former != nullptr)
          LeaveCheckpoints(former);
      }
      jobs_.erase(change.job_removed().job_id());
      return absl::OkStatus();
    case v1::JournalChange::kHistoryRestored:
      BecomeRestored(change.history_restored().term());
      return absl::OkStatus();
    case v1::JournalChange::kJobClosed:
      return ApplyToJob(change.job_closed());
    case v1::JournalChange::kGenerationSealed:
      return ApplyToJob(change.generation_sealed());
    case v1::JournalChange::kGenerationClosed:
      return ApplyToJob(change.generation_closed());
    case v1::JournalChange::kSeatTaken:
      return ApplyToJob(change.seat_taken());
    case v1::JournalChange::kWorkerEnded:
      return ApplyToJob(change.worker_ended());
    case v1::JournalChange::kIncarnationFenced:
      return ApplyToJob(change.incarnation_fenced());
    case v1::JournalChange::kWorkerDeparted:
      return ApplyToJob(change.worker_departed());
    case v1::JournalChange::kKvChanged:
      return ApplyToJob(change.kv_changed());
    case v1::JournalChange::kTriggerChanged:
      return ApplyToJob(change.trigger_changed());
    case v1::JournalChange::kTriggerAcked:
      return ApplyToJob(change.trigger_acked());
    case v1::JournalChange::kBarrierEnded:
      return ApplyToJob(change.barrier_ended());
    case v1::JournalChange::kHostStruck:
      return ApplyToJob(change.host_struck());
    case v1::JournalChange::kHostQuarantined:
      return ApplyToJob(change.host_quarantined());
    case v1::JournalChange::kRequestAnswered:
      return ApplyToJob(change.request_answered());
    case v1::JournalChange::kRequestsForgotten:
      return ApplyToJob(change.requests_forgotten());
    case v1::JournalChange::kCheckpointChanged:
      return ApplyToJob(change.checkpoint_changed());
    case v1::JournalChange::kJobRecordChanged:
      return submitted_->Restore(change.job_record_changed());
    case v1::JournalChange::kNodeChanged:
      submitted_->Restore(change.node_changed());
      return absl::OkStatus();
    case v1::JournalChange::KIND_NOT_SET:
      break;
  }
  return absl::DataLossError(
      "the journal holds a kind of change that this version does not know: use a newer "
      "coordinator");
}

absl::Status Core::Restore(absl::string_view bytes) {
  v1::CoordinatorSnapshot snapshot;
  if (impl_->serving_ || (impl_->revision_ != 0 && !impl_->restoring_)) {
    return absl::FailedPreconditionError("a snapshot can only be restored into a new core");
  }
  if (!snapshot.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return absl::DataLossError(
        absl::StrCat("the snapshot of ", bytes.size(), " bytes cannot be read: it is not one"));
  }
  if (impl_->restoring_ && snapshot.revision() != impl_->revision_) {
    return absl::DataLossError(absl::StrCat("a part of the snapshot of revision ",
                                            snapshot.revision(), " comes after one of revision ",
                                            impl_->revision_));
  }
  impl_->restoring_ = true;
  impl_->revision_ = impl_->last_record_ = snapshot.revision();
  impl_->term_ = snapshot.term();
  impl_->restored_term_ = snapshot.restored_term();
  for (const v1::JournalChange& change : snapshot.changes()) {
    if (absl::Status status = impl_->ApplyChange(change); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Core::Replay(absl::string_view payload) {
  v1::JournalRecord record;
  if (impl_->serving_)
    return absl::FailedPreconditionError("the core already serves: replay before StartTerm");
  if (!record.ParseFromArray(payload.data(), static_cast<int>(payload.size()))) {
    return absl::DataLossError(
        absl::StrCat("the record after revision ", impl_->last_record_, " cannot be read"));
  }
  if (record.revision() <= impl_->last_record_) {
    return absl::DataLossError(absl::StrCat("the journal holds revision ", record.revision(),
                                            " after revision ", impl_->last_record_));
  }
  impl_->restoring_ = false;
  impl_->revision_ = impl_->last_record_ = record.revision();
  for (const v1::JournalChange& change : record.changes()) {
    if (absl::Status status = impl_->ApplyChange(change); !status.ok()) return status;
  }
  return absl::OkStatus();
}

Core::Impl::SnapshotParts::SnapshotParts(const Impl& core, size_t part_bytes,
                                         absl::FunctionRef<absl::Status(std::string)> part)
    : part_bytes_(part_bytes), part_(part) {
  snapshot_.set_revision(core.last_record_);
  snapshot_.set_term(core.term_);
  snapshot_.set_restored_term(core.restored_term_);
}

absl::Status Core::WriteSnapshot(size_t part_bytes,
                                 absl::FunctionRef<absl::Status(std::string part)> part) const {
  Impl::SnapshotParts parts(*impl_, part_bytes, part);
  for (const Impl::Job* job : impl_->JobsById()) {
    job->SnapshotTo(&parts);
    if (!parts.status().ok()) return parts.status();
  }
  impl_->submitted_->ForEachChange([&](const v1::JournalChange& change) { *parts.Add() = change; });
  return parts.Finish();
}

std::string Core::Snapshot() const {
  // Parsing messages that follow one another merges them.
  std::string all;
  (void)WriteSnapshot(kPartBytes, [&](const std::string& part) {
    all += part;
    return absl::OkStatus();
  });
  return all;
}

std::string Core::SnapshotHosts() const {
  std::string all;
  const auto append = [&](const std::string& part) {
    all += part;
    return absl::OkStatus();
  };
  Impl::SnapshotParts parts(*impl_, kPartBytes, append);
  for (const Impl::Job* job : impl_->JobsById()) job->SnapshotHostsTo(&parts);
  (void)parts.Finish();
  return all;
}

absl::Status Core::RestoreHosts(absl::string_view bytes) {
  v1::CoordinatorSnapshot hosts;
  if (!hosts.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) ||
      hosts.revision() != impl_->last_record_) {
    return absl::DataLossError(absl::StrCat("the quarantines of revision ", hosts.revision(),
                                            " do not belong to revision ", impl_->last_record_));
  }
  for (auto& [id, job] : impl_->jobs_) job->ForgetHosts();
  for (const v1::JournalChange& change : hosts.changes()) {
    if (absl::Status status = impl_->ApplyChange(change); !status.ok()) return status;
  }
  return absl::OkStatus();
}

void Core::Impl::Job::StartTerm() {
  log_ = std::make_unique<WatchLog>(impl_->options_.watch_events, impl_->options_.watch_bytes,
                                    impl_->revision_);
  membership_record_ = kv_record_ = barrier_record_ = impl_->last_record_;
  quarantine_.StartTerm(impl_->now_);
  members_.StartTerm(impl_->now_);
  leases_.StartTerm(impl_->now_);
  if (barriers_ != nullptr) barriers_->HoldFailuresUntil(impl_->now_ + Lease());
  // Leases end before that, after a look at what has not been read yet.
  const absl::Time hold = impl_->now_ + leases_.TimeToReturn() + kLeastRest;
  if (agree_ != nullptr) agree_->HoldFailuresUntil(hold);
  kv_.HoldFailuresUntil(hold);
  triggers_.Resume();
  if (members_.sealed()) {
    for (const Seat& seat : members_.seats()) {
      if (seat.alive()) continue;
      barriers_->RankGone(seat.rank(), GoneText(seat), impl_->now_);
      std::vector<v1::TriggerChanged> changes;
      triggers_.RankGone(seat.rank(), &changes);
      TriggersChanged(std::move(changes));
    }
  }
}

void Core::StartTerm(uint64_t term, absl::Time now, Output* out, bool restored) {
  MUSTER_CHECK(!impl_->serving_ && term > impl_->term_ && term <= kMaxTerm)
      << "term " << term << " cannot begin after term " << impl_->term_;
  const uint64_t lost_terms = restored ? term - impl_->term_ : 0;
  impl_->Begin(now, out);
  impl_->term_ = term;
  impl_->serving_ = true;
  impl_->revision_ = std::max(impl_->revision_, term << kRevisionBits);
  impl_->Change()->mutable_term_started()->set_term(term);
  if (restored) {
    impl_->Change()->mutable_history_restored()->set_term(term);
    impl_->BecomeRestored(term);
    for (const auto& [id, job] : impl_->jobs_) {
      impl_->Note(id, true,
                  absl::StrCat("restored from a copy: generations up to ", job->generation(),
                               " have ended, and their workers join again"));
    }
  }
  // In one record: after a crash either all of the restore is there, or the next start is a restore
  // again.
  const std::vector<Impl::EndedGroup> ended = impl_->StartJobsTerm(lost_terms);
  for (auto& [id, job] : impl_->jobs_) {
    job->StartTerm();
    impl_->End(job.get());
  }
  impl_->CloseGroups(ended);
}

}  // namespace muster::coordinator
