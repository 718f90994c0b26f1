#ifndef MUSTER_COORDINATOR_KV_H_
#define MUSTER_COORDINATOR_KV_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/node_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/muster/v1/error.pb.h"
#include "proto/muster/v1/kv.pb.h"

namespace muster::coordinator {

using CallId = uint64_t;

// What one event did to one key.
struct KvChange {
  std::string key;
  std::shared_ptr<const v1::KeyValue> before;  // null: the key was absent
  std::shared_ptr<const v1::KeyValue> after;   // null: the key was deleted
};

// The key-value store of one job: hash look-ups, ordered prefixes, transactions, leases and held
// waits. Not thread-safe. Revisions are the caller's: one for each event that changes something.
class KvStore {
 public:
  static constexpr size_t kMaxKey = 1024;
  static constexpr size_t kMaxValue = 1 << 20;
  static constexpr int kMaxOps = 4096;  // of each list of a transaction
  static constexpr int kMaxWaitKeys = 16384;
  static constexpr int kDefaultGetLimit = 1000;
  static constexpr size_t kMaxReplyBytes = 3 << 20;

  // Runs a transaction: all or nothing. Writes carry `revision`; `changes` gets one entry for each
  // key that differs afterwards (none: nothing was written and the revision is unused). Keys put
  // with_lease belong to `lease_worker`. Errors: INVALID_ARGUMENT / BAD_FIELD or LIMIT, naming the
  // operation; nothing is changed then.
  std::optional<v1::OpError> Txn(const v1::TxnRequest& request, absl::string_view lease_worker,
                                 uint64_t revision, v1::TxnReply* reply,
                                 std::vector<KvChange>* changes);
  // Whether the answer to this transaction tells anything that was not in the request: it reads, or
  // conditions.
  static bool Reads(const v1::TxnRequest& request);

  // Deletes the keys tied to the lease of `worker_id`; all keys under `prefix`.
  bool HasLease(absl::string_view worker_id) const { return leased_.contains(worker_id); }
  void DropLease(absl::string_view worker_id, std::vector<KvChange>* changes);
  void DropPrefix(absl::string_view prefix, std::vector<KvChange>* changes);

  // Puts a key as it was, at replay; deletes one.
  void RestorePut(const v1::KeyValue& kv);
  void RestoreDelete(absl::string_view key);

  std::shared_ptr<const v1::KeyValue> Find(absl::string_view key) const;
  size_t size() const { return entries_.size(); }
  // Calls f(const v1::KeyValue&) for each durable key, in key order.
  template <typename F>
  void ForEachDurable(F f) const {
    for (const absl::string_view key : order_) {
      const v1::KeyValue& kv = *entries_.find(key)->second;
      if (kv.klass() == v1::KV_CLASS_DURABLE) f(kv);
    }
  }

  // Held waits. StartWait answers at once (true) if all keys exist, else holds `call`. `worker_id`
  // is who waits (empty: an operator). Errors: BAD_FIELD, LIMIT, DEADLINE_REQUIRED.
  struct Ready {
    CallId call = 0;
    std::shared_ptr<const v1::WaitReply> reply;  // null: failed
    v1::OpError error;
  };
  std::optional<v1::OpError> CheckWait(const v1::WaitRequest& request) const;
  bool StartWait(CallId call, const v1::WaitRequest& request, absl::Time now, v1::WaitReply* reply);
  void AbandonWait(CallId call);
  // After `changes`: the waits that are now fulfilled. Equal waits share one reply.
  void TakeReady(const std::vector<KvChange>& changes, std::vector<Ready>* ready);
  // The waits whose deadline is at or before `now`, with WAIT_TIMEOUT naming the first missing key.
  void TakeExpired(absl::Time now, std::vector<Ready>* ready);
  // The calls of all waits by workers (not operators).
  std::vector<CallId> TakeWorkerWaits();
  absl::Time NextDeadline() const;

 private:
  struct Wait {
    std::vector<std::string> keys;  // as asked
    size_t missing = 0;             // of the distinct keys
    absl::Time deadline;
    absl::Duration timeout;
    bool by_worker = false;
  };
  using Entries = absl::node_hash_map<std::string, std::shared_ptr<const v1::KeyValue>>;

  // The current value becomes `after` (null: none). Returns the former one.
  std::shared_ptr<const v1::KeyValue> Set(absl::string_view key,
                                          std::shared_ptr<const v1::KeyValue> after);
  std::optional<v1::OpError> Apply(const v1::KvOp& op, int index, absl::string_view lease_worker,
                                   uint64_t revision, size_t* reply_bytes, v1::KvOpResult* result,
                                   std::vector<KvChange>* changes);
  bool Holds(const v1::Compare& compare) const;
  void Write(absl::string_view key, std::string value, v1::KvClass klass,
             absl::string_view lease_worker, uint64_t revision, std::vector<KvChange>* changes);
  void ForgetWait(CallId call);

  Entries entries_;
  absl::btree_set<absl::string_view> order_;  // views of the keys in entries_, which do not move
  absl::flat_hash_map<std::string, absl::btree_set<std::string>> leased_;  // by worker_id

  absl::flat_hash_map<CallId, Wait> waits_;
  absl::flat_hash_map<std::string, absl::btree_set<CallId>> waiting_for_;  // by key
  absl::btree_set<std::pair<absl::Time, CallId>> deadlines_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_KV_H_
