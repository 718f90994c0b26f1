#include "coordinator/trigger.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"

namespace muster::coordinator {

void TriggerSet::ResetRanks(Trigger* trigger) {
  trigger->acked.assign(world_size_, false);
  trigger->promised.assign(world_size_, false);
  trigger->max_horizon = 0;
  const auto living = std::count(gone_.begin(), gone_.end(), false);
  trigger->unacked = trigger->unpromised = static_cast<int>(living);
}

void TriggerSet::RestoreGeneration(int world_size) {
  world_size_ = world_size;
  gone_.assign(world_size, false);
  max_step_ = 0;
  for (auto& [id, trigger] : triggers_) ResetRanks(&trigger);
}

void TriggerSet::Resume() {
  gone_.assign(world_size_, false);
  max_step_ = 0;
  for (auto& [id, trigger] : triggers_) {
    const std::vector<bool> acked = std::move(trigger.acked);
    ResetRanks(&trigger);
    trigger.acked = acked;
    trigger.unacked -= static_cast<int>(std::count(acked.begin(), acked.end(), true));
  }
}

void TriggerSet::DropAll(std::vector<v1::TriggerChanged>* changes) {
  for (const auto& [id, trigger] : triggers_) {
    v1::TriggerChanged change;
    *change.mutable_trigger() = trigger.record;
    change.set_removed(true);
    changes->push_back(std::move(change));
  }
  triggers_.clear();
}

void TriggerSet::StartGeneration(int world_size, std::vector<v1::TriggerChanged>* changes) {
  for (auto it = triggers_.begin(); it != triggers_.end();) {
    v1::TriggerRecord& record = it->second.record;
    v1::TriggerChanged change;
    if (record.raised_by_rank() >= 0) {
      *change.mutable_trigger() = record;
      change.set_removed(true);
      changes->push_back(std::move(change));
      it = triggers_.erase(it);
      continue;
    }
    if (record.effective_step() >= 0 && record.align() != v1::TRIGGER_ALIGN_NOW) {
      record.set_effective_step(-1);
      *change.mutable_trigger() = record;
      changes->push_back(std::move(change));
    }
    ++it;
  }
  RestoreGeneration(world_size);
}

std::optional<v1::OpError> TriggerSet::Raise(const v1::RaiseTriggerRequest& request, int rank,
                                             uint64_t trigger_id, v1::RaiseTriggerReply* reply,
                                             std::vector<v1::TriggerChanged>* changes) {
  if (request.name().empty() || request.name().size() > kMaxName) {
    return BadField("name", absl::StrCat("a trigger's name has 1 to ", kMaxName, " bytes, not ",
                                         request.name().size()));
  }
  if (request.payload().size() > kMaxPayload) {
    return TooLarge("payload",
                    absl::StrCat("the payload of trigger ", Quoted(request.name()), " has ",
                                 request.payload().size(), " bytes: at most ", kMaxPayload));
  }
  const int align = request.align() == v1::TRIGGER_ALIGN_UNSPECIFIED ? v1::TRIGGER_ALIGN_NEXT_STEP
                                                                     : request.align();
  if (rank >= 0 && align == v1::TRIGGER_ALIGN_NEXT_STEP) {
    // No rank has acted on a trigger that is not decided yet: all act on it once, no matter how
    // many callers raise it.
    for (const auto& [id, trigger] : triggers_) {
      const v1::TriggerRecord& record = trigger.record;
      if (trigger.decided() || record.raised_by_rank() < 0 || record.align() != align ||
          record.name() != request.name() || record.payload() != request.payload() ||
          record.min_lead_steps() != request.min_lead_steps()) {
        continue;
      }
      reply->set_trigger_id(id);
      reply->set_effective_step(record.effective_step());
      return std::nullopt;
    }
  }
  if (triggers_.size() >= kMaxLive) {
    return TooLarge(
        "name", absl::StrCat(triggers_.size(), " triggers wait for ranks to act on them: trigger ",
                             Quoted(request.name()), " must wait until some have"));
  }
  size_t payloads = request.payload().size();
  for (const auto& [id, trigger] : triggers_) payloads += trigger.record.payload().size();
  if (payloads > kMaxPayloads) {
    return TooLarge("payload", absl::StrCat("the payload of trigger ", Quoted(request.name()),
                                            " makes those of all pending triggers ", payloads,
                                            " bytes: at most ", kMaxPayloads,
                                            "; put it under a key and send the key"));
  }
  if (request.min_lead_steps() < 0 || request.min_lead_steps() > kMaxStep) {
    return BadField("min_lead_steps",
                    absl::StrCat("min_lead_steps of trigger ", Quoted(request.name()), " is ",
                                 request.min_lead_steps(), ": give 0 or more"));
  }
  if (!v1::TriggerAlign_IsValid(align)) {
    return BadField("align",
                    absl::StrCat("trigger ", Quoted(request.name()), " asks for alignment ", align,
                                 ", which this server does not know"));
  }
  if (align == v1::TRIGGER_ALIGN_AT_STEP) {
    if (request.step() < 0 || request.step() > kMaxStep) {
      return BadField("step", absl::StrCat("trigger ", Quoted(request.name()), " asks for step ",
                                           request.step()));
    }
    if (request.step() <= max_step_) {
      v1::OpError error =
          MakeError(absl::StatusCode::kFailedPrecondition, v1::ERROR_REASON_BAD_FIELD,
                    absl::StrCat("trigger ", Quoted(request.name()), " asks for step ",
                                 request.step(), ", but a rank has already finished step ",
                                 max_step_, ": ask for a later one"));
      error.mutable_detail()->set_field("step");
      return error;
    }
  }
  Trigger trigger;
  trigger.record.set_trigger_id(trigger_id);
  trigger.record.set_name(request.name());
  trigger.record.set_payload(request.payload());
  trigger.record.set_align(align);
  trigger.record.set_step(request.step());
  trigger.record.set_min_lead_steps(request.min_lead_steps());
  trigger.record.set_effective_step(-1);
  trigger.record.set_raised_by_rank(rank);
  ResetRanks(&trigger);
  const auto it = triggers_.emplace(trigger_id, std::move(trigger)).first;
  const size_t before = changes->size();
  Decide(changes);
  if (changes->size() == before) {
    v1::TriggerChanged change;
    *change.mutable_trigger() = it->second.record;
    changes->push_back(std::move(change));
  }
  reply->set_trigger_id(trigger_id);
  reply->set_effective_step(it->second.record.effective_step());
  return std::nullopt;
}

void TriggerSet::Decide(std::vector<v1::TriggerChanged>* changes) {
  if (world_size_ == 0) return;
  for (auto& [id, trigger] : triggers_) {
    if (trigger.decided() || trigger.unpromised > 0) continue;
    v1::TriggerRecord& record = trigger.record;
    record.set_effective_step(record.align() == v1::TRIGGER_ALIGN_AT_STEP
                                  ? std::max(record.step(), trigger.max_horizon)
                                  : trigger.max_horizon + record.min_lead_steps());
    if (decides_early_) record.set_effective_step(std::max<int64_t>(0, trigger.max_horizon - 2));
    v1::TriggerChanged change;
    *change.mutable_trigger() = record;
    changes->push_back(std::move(change));
  }
}

std::optional<v1::OpError> TriggerSet::Poll(const v1::PollTriggersRequest& request, int rank,
                                            v1::PollTriggersReply* reply,
                                            std::vector<v1::TriggerChanged>* changes,
                                            std::vector<uint64_t>* acked) {
  if (request.step() < 0 || request.step() > kMaxStep) {
    return BadField("step", absl::StrCat("rank ", rank, " says that its last finished step is ",
                                         request.step(), ": count steps from 0"));
  }
  const int64_t horizon = request.horizon() == 0 ? request.step() + 1 : request.horizon();
  if (horizon <= request.step() || horizon > kMaxStep) {
    return BadField("horizon", absl::StrCat("the horizon ", horizon, " of rank ", rank,
                                            " must be after its step ", request.step()));
  }
  for (const uint64_t id : request.acked()) {
    const auto it = triggers_.find(id);
    if (it == triggers_.end() || it->second.acked[rank]) continue;
    it->second.acked[rank] = true;
    if (!gone_[rank]) --it->second.unacked;
    acked->push_back(id);
  }
  RemoveDone(changes);
  acked->erase(std::remove_if(acked->begin(), acked->end(),
                              [this](uint64_t id) { return !triggers_.contains(id); }),
               acked->end());
  max_step_ = std::max(max_step_, request.step());
  for (const uint64_t id : request.pending()) {
    const auto it = triggers_.find(id);
    if (it == triggers_.end() || it->second.decided()) continue;
    Trigger& trigger = it->second;
    trigger.max_horizon = std::max(trigger.max_horizon, horizon);
    if (trigger.promised[rank]) continue;
    trigger.promised[rank] = true;
    if (!gone_[rank]) --trigger.unpromised;
  }
  Decide(changes);
  for (const auto& [id, trigger] : triggers_) {
    if (trigger.acked[rank]) continue;
    v1::TriggerEvent* event = reply->add_triggers();
    event->set_trigger_id(id);
    event->set_name(trigger.record.name());
    event->set_payload(trigger.record.payload());
    event->set_effective_step(trigger.record.effective_step());
    event->set_raised_by_rank(trigger.record.raised_by_rank());
    event->set_align(static_cast<v1::TriggerAlign>(trigger.record.align()));
  }
  return std::nullopt;
}

void TriggerSet::RemoveDone(std::vector<v1::TriggerChanged>* changes) {
  for (auto it = triggers_.begin(); it != triggers_.end();) {
    if (it->second.unacked > 0 || !it->second.decided() || world_size_ == 0) {
      ++it;
      continue;
    }
    v1::TriggerChanged change;
    change.mutable_trigger()->set_trigger_id(it->first);
    change.set_removed(true);
    changes->push_back(std::move(change));
    it = triggers_.erase(it);
  }
}

void TriggerSet::RankGone(int rank, std::vector<v1::TriggerChanged>* changes) {
  if (rank < 0 || rank >= world_size_ || gone_[rank]) return;
  gone_[rank] = true;
  for (auto& [id, trigger] : triggers_) {
    if (!trigger.acked[rank]) --trigger.unacked;
    if (!trigger.promised[rank]) --trigger.unpromised;
  }
  RemoveDone(changes);
  Decide(changes);
}

void TriggerSet::RankReplaced(int rank) {
  if (rank < 0 || rank >= world_size_) return;
  const bool was_gone = gone_[rank];
  gone_[rank] = false;
  for (auto& [id, trigger] : triggers_) {
    // The new incarnation must acknowledge or promise everything that the former one did.
    if (was_gone || trigger.acked[rank]) ++trigger.unacked;
    if (was_gone || trigger.promised[rank]) ++trigger.unpromised;
    trigger.acked[rank] = false;
    trigger.promised[rank] = false;
  }
}

void TriggerSet::Restore(const v1::TriggerChanged& change) {
  if (change.removed()) {
    triggers_.erase(change.trigger().trigger_id());
    return;
  }
  const auto [it, is_new] = triggers_.try_emplace(change.trigger().trigger_id());
  it->second.record = change.trigger();
  if (is_new) ResetRanks(&it->second);
}

void TriggerSet::RestoreAck(uint64_t trigger_id, int rank) {
  const auto it = triggers_.find(trigger_id);
  if (it == triggers_.end() || rank < 0 || rank >= world_size_ || it->second.acked[rank]) return;
  it->second.acked[rank] = true;
  --it->second.unacked;
}

}  // namespace muster::coordinator
