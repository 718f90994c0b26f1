#include "worker/checkpoint/seal_order.h"

#include <cstdint>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "base/file.h"
#include "base/json.h"
#include "base/regular_file.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/record_cache.h"
#include "worker/checkpoint/sealing.h"

namespace muster {
namespace {

constexpr int64_t kMaxBytes = 1 << 20;

// The facts of a record (seal.h) that determine the order; a damaged record has none.
struct Order {
  bool of_rank_0 = false;
  uint64_t id = 0;
  std::string sha256, previous;
};

std::optional<Order> ReadOrder(const std::string& dir) {
  for (const char* const name : {kSealName, kSealingName}) {
    const std::string path = JoinPath(dir, name);
    const absl::StatusOr<std::string> text = ReadRegularFile(path, kMaxBytes);
    if (absl::IsNotFound(text.status())) continue;
    if (!text.ok()) break;
    const absl::StatusOr<nlohmann::json> json = ParseJson(*text, path);
    if (!json.ok()) break;
    try {
      if (json->at("format") != kSealFormat) break;
      return Order{.of_rank_0 = json->at("job").get<std::string>().empty(),
                   .id = json->at("id").get<uint64_t>(),
                   .sha256 = json->at("sha256").get<std::string>(),
                   .previous = json->at("previous").get<std::string>()};
    } catch (const nlohmann::json::exception&) {
      break;
    }
  }
  return std::nullopt;
}

// The hash of the previous record, by the hash of each record in the folders around these two.
using Chain = absl::flat_hash_map<std::string, std::string>;
Chain ReadChain(const std::string& dir, const std::string& than) {
  static auto* const cache = new RecordCache<Order>(&ReadOrder);
  Chain chain;
  const std::set<std::string> parents = {ParentPath(dir), ParentPath(than)};
  for (const std::string& parent : parents) {
    std::vector<Order> orders = cache->ReadAll(parent);
    for (Order& order : orders) {
      if (order.sha256.empty() || order.previous.empty()) continue;
      chain.emplace(std::move(order.sha256), std::move(order.previous));
    }
  }
  return chain;
}

// Whether the chain leads from the record `from` back to the record `to`.
bool LeadsBack(const Chain& chain, const std::string& from, const std::string& to) {
  auto at = chain.find(from);
  // Bounded, because records that were tampered with may form a cycle.
  for (size_t i = 0; i < chain.size() && at != chain.end(); ++i) {
    if (at->second == to) return true;
    at = chain.find(at->second);
  }
  return false;
}

}  // namespace

std::optional<bool> IsSealedAfter(const std::string& dir, const std::string& than) {
  const std::optional<Order> mine = ReadOrder(dir), other = ReadOrder(than);
  if (!mine.has_value() || !other.has_value() || mine->sha256 == other->sha256) return std::nullopt;
  if (mine->sha256.empty() || other->sha256.empty()) return std::nullopt;
  if (mine->previous == other->sha256) return true;
  if (other->previous == mine->sha256) return false;
  if (mine->of_rank_0 && other->of_rank_0 && mine->id != other->id) return mine->id > other->id;
  const Chain chain = ReadChain(dir, than);
  if (LeadsBack(chain, mine->sha256, other->sha256)) return true;
  if (LeadsBack(chain, other->sha256, mine->sha256)) return false;
  return std::nullopt;
}

}  // namespace muster
