#include "coordinator/watch_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {
// The bytes of the history itself for each event, with what the allocator needs for its contents.
constexpr uint32_t kEventBytes = 48;
}  // namespace

WatchLog::WatchLog(size_t max_events, size_t max_bytes, uint64_t compacted)
    : max_events_(max_events), max_bytes_(max_bytes), compacted_(compacted) {}

void WatchLog::Add(Event event) {
  bytes_ += event.bytes;
  events_.push_back(std::move(event));
  while (events_.size() > 1 && (events_.size() > max_events_ || bytes_ > max_bytes_)) {
    const uint64_t dropped = events_.front().revision;
    // The revision being written stays whole.
    if (dropped == events_.back().revision) break;
    while (events_.front().revision == dropped) {
      bytes_ -= events_.front().bytes;
      events_.pop_front();
    }
    compacted_ = dropped;
  }
}

void WatchLog::Put(uint64_t revision, KvEntry::Ptr entry) {
  Event event;
  event.revision = revision;
  event.bytes = kEventBytes + static_cast<uint32_t>(entry->bytes());
  event.entry = std::move(entry);
  Add(std::move(event));
}

void WatchLog::Deleted(uint64_t revision, absl::string_view key) {
  Event event;
  event.revision = revision;
  event.deleted = true;
  event.entry = KvEntry::Make({.key = key});  // without the value it had
  event.bytes = kEventBytes + static_cast<uint32_t>(event.entry->bytes());
  Add(std::move(event));
}

void WatchLog::Other(uint64_t revision, v1::WatchEvent other) {
  Event event;
  event.revision = revision;
  event.other = std::make_unique<v1::WatchEvent>(std::move(other));
  event.bytes = 2 * kEventBytes + static_cast<uint32_t>(event.other->ByteSizeLong());
  Add(std::move(event));
}

void WatchLog::Compact() {
  if (events_.empty()) return;
  compacted_ = events_.back().revision;
  std::deque<Event>().swap(events_);
  bytes_ = 0;
}

void WatchLog::MarkDurable(uint64_t revision) {
  for (auto it = events_.rbegin(); it != events_.rend() && it->revision == revision; ++it) {
    it->durable = true;
  }
}

std::optional<v1::OpError> WatchLog::Read(const v1::WatchRequest& request, uint64_t from,
                                          uint64_t durable_revision, uint64_t last_revision,
                                          size_t max_bytes, v1::WatchBatch* batch) const {
  if (from <= compacted_) {
    v1::OpError error = MakeError(
        absl::StatusCode::kOutOfRange, v1::ERROR_REASON_COMPACTED,
        absl::StrCat("revision ", from, " is no longer kept (the oldest is ", compacted_ + 1,
                     "): read the keys again and watch from the revision of that reply"));
    error.mutable_detail()->set_compacted_revision(compacted_);
    return error;
  }
  batch->set_next_revision(std::max(from, last_revision + 1));
  auto it = std::partition_point(events_.begin(), events_.end(),
                                 [from](const Event& event) { return event.revision < from; });
  size_t bytes = 0;
  uint64_t current = 0;
  for (; it != events_.end(); ++it) {
    if (it->durable && it->revision > durable_revision) {
      batch->set_next_revision(it->revision);
      break;
    }
    if (it->revision != current) {
      if (bytes >= max_bytes) {
        batch->set_next_revision(it->revision);
        break;
      }
      current = it->revision;
    }
    if (it->entry != nullptr) {
      const absl::string_view key = it->entry->key();
      if (!request.keys() || !absl::StartsWith(key, request.key_prefix())) continue;
      v1::WatchEvent* event = batch->add_events();
      event->set_revision(it->revision);
      if (it->deleted) {
        event->set_deleted_key(key.data(), key.size());
      } else {
        it->entry->CopyTo(event->mutable_put());
      }
    } else {
      if (!request.members()) continue;
      v1::WatchEvent* event = batch->add_events();
      *event = *it->other;
      event->set_revision(it->revision);
    }
    bytes += it->bytes;
  }
  return std::nullopt;
}

}  // namespace muster::coordinator
