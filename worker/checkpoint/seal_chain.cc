#include "worker/checkpoint/seal_chain.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/record_cache.h"
#include "worker/checkpoint/seal.h"

namespace muster {
namespace {

std::optional<RegisteredCheckpoint> ReadRecord(const std::string& dir) {
  absl::StatusOr<RegisteredCheckpoint> record = ReadSeal(dir);
  return record.ok() ? std::optional(*std::move(record)) : std::nullopt;
}

}  // namespace

ChainEnd EndOfChain(const std::vector<RegisteredCheckpoint>& records, absl::Time now) {
  ChainEnd end;
  if (records.empty()) return end;
  absl::flat_hash_map<absl::string_view, const RegisteredCheckpoint*> after;
  for (const RegisteredCheckpoint& record : records) {
    end.highest_id = std::max(end.highest_id, record.id);
    if (!record.previous_sha256.empty()) after.emplace(record.previous_sha256, &record);
  }
  const auto follow = [&](const RegisteredCheckpoint* record) {
    // Bounded, because records that were tampered with may form a cycle.
    for (size_t i = 0; i < records.size(); ++i) {
      const auto next = after.find(record->sha256);
      if (next == after.end()) break;
      record = next->second;
    }
    return record;
  };
  const auto now_us = static_cast<uint64_t>(std::max<int64_t>(absl::ToUnixMicros(now), 0));
  const auto age = [&](const RegisteredCheckpoint& record) {
    return std::make_pair(record.created_us <= now_us, record.created_us);
  };
  const RegisteredCheckpoint* last =
      follow(&*std::max_element(records.begin(), records.end(),
                                [&](const auto& a, const auto& b) { return age(a) < age(b); }));
  // Ids of a coordinator are its revisions, and the next coordinator may begin lower, so they are
  // not compared.
  if (last->job.empty()) {
    for (const RegisteredCheckpoint& record : records) {
      if (record.job.empty() && record.id > last->id) last = &record;
    }
    last = follow(last);
  }
  end.last = *last;
  return end;
}

ChainEnd ReadChainEnd(const std::string& parent, absl::Time now) {
  static auto* const cache = new RecordCache<RegisteredCheckpoint>(&ReadRecord);
  return EndOfChain(cache->ReadAll(parent), now);
}

}  // namespace muster
