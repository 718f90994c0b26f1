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
#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "coordinator/kv_entry.h"
#include "proto/muster/v1/error.pb.h"
#include "proto/muster/v1/kv.pb.h"

namespace muster::coordinator {

using CallId = uint64_t;

// The effect of one event on one key.
struct KvChange {
  KvEntry::Ptr before;  // null: the key was absent
  KvEntry::Ptr after;   // null: the key was deleted

  absl::string_view key() const { return after != nullptr ? after->key() : before->key(); }
};

// The limits of what the stores of all jobs may hold in memory, which is about the size of a
// snapshot of them: the journal can be cut only while the state fits into one.
struct KvBudget {
  size_t of_job = 256 << 20;
  size_t of_all = 768 << 20;
  size_t used = 0;  // by all
};

// The key-value store of one job: hash look-ups, ordered prefixes, transactions, leases and held
// waits. Not thread-safe. Revisions are the caller's: one for each event that changes something.
class KvStore {
 public:
  static constexpr size_t kMaxKey = 1024;
  static constexpr size_t kMaxValue = 1 << 20;
  static constexpr int kMaxOps = 4096;  // in each list of a transaction
  static constexpr int kMaxWaitKeys = 16384;
  static constexpr int kDefaultGetLimit = 1000;
  static constexpr size_t kMaxReplyBytes = 3 << 20;  // for a page
  // The bytes of all values in one answer. A message has 4 MiB.
  static constexpr size_t kMaxAnswerBytes = 15 << 18;

  // `budget` (null: unlimited) must outlive this.
  explicit KvStore(KvBudget* budget = nullptr) : budget_(budget) {}
  ~KvStore() {
    if (budget_ != nullptr) budget_->used -= bytes_;
  }
  KvStore(const KvStore&) = delete;
  KvStore& operator=(const KvStore&) = delete;

  // Runs a transaction: all or nothing. Writes carry `revision`; `changes` gets one entry for each
  // key that differs afterwards (none: nothing was written and the revision is unused). Keys put
  // with_lease belong to `lease_worker`. Errors: INVALID_ARGUMENT / BAD_FIELD or LIMIT, naming the
  // operation; RESOURCE_EXHAUSTED / LIMIT, if it would leave more than before and more than the
  // budget; nothing is changed then.
  std::optional<v1::OpError> Txn(const v1::TxnRequest& request, absl::string_view lease_worker,
                                 uint64_t revision, v1::TxnReply* reply,
                                 std::vector<KvChange>* changes);
  // Returns whether the answer to this transaction reveals anything that was not in the request: it
  // has reads or conditions.
  static bool Reads(const v1::TxnRequest& request);
  // Returns whether the transaction can change anything.
  static bool Writes(const v1::TxnRequest& request);

  // DropLease deletes the keys tied to the lease of `worker_id`, DropPrefix all keys under
  // `prefix`.
  void DropLease(absl::string_view worker_id, std::vector<KvChange>* changes);
  void DropPrefix(absl::string_view prefix, std::vector<KvChange>* changes);

  // RestorePut puts a key as it was, at replay; RestoreDelete deletes one.
  void RestorePut(const v1::KeyValue& kv);
  void RestoreDelete(absl::string_view key);
  // Raises the version of every key above any that a client can have seen.
  void RaiseVersions(uint64_t by);

  // Returns null if there is no such key. Valid until the next change.
  const KvEntry* Find(absl::string_view key) const {
    const auto it = entries_.find(key);
    return it == entries_.end() ? nullptr : it->entry.get();
  }
  size_t size() const { return entries_.size(); }
  size_t bytes() const { return bytes_; }
  // Calls f(const KvEntry&) for each durable key, in key order.
  template <typename F>
  void ForEachDurable(F f) const {
    for (const std::string& key : order_) {
      if (const KvEntry& entry = *Find(key); entry.durable()) f(entry);
    }
  }

  // Held waits. StartWait answers at once (true) if all keys exist, else holds `call`. `worker_id`
  // is the waiting worker (empty: an operator). Errors: BAD_FIELD, LIMIT, DEADLINE_REQUIRED. LIMIT
  // also comes with the last key, if the values are then more than kMaxAnswerBytes.
  struct Ready {
    CallId call = 0;
    std::shared_ptr<const v1::WaitReply> reply;  // null: failed
    v1::OpError error;
  };
  std::optional<v1::OpError> CheckWait(const v1::WaitRequest& request) const;
  bool StartWait(CallId call, const v1::WaitRequest& request, absl::Time now, v1::WaitReply* reply);
  // After a restart, waits that come again have until `until`, or for their timeout if that is
  // less, however long they have waited: the worker that writes what they wait for may come back
  // later.
  void HoldFailuresUntil(absl::Time until) { hold_until_ = until; }
  void AbandonWait(CallId call);
  // Takes the waits that `changes` have fulfilled. Equal waits share one reply.
  void TakeReady(const std::vector<KvChange>& changes, std::vector<Ready>* ready);
  // Takes the waits whose deadline is at or before `now`, with WAIT_TIMEOUT naming the first
  // missing key.
  void TakeExpired(absl::Time now, std::vector<Ready>* ready);
  // Takes the calls of all waits, or only of those by workers (not operators).
  std::vector<CallId> TakeWaits(bool only_workers);
  absl::Time NextDeadline() const;

 private:
  struct Wait {
    std::vector<std::string> keys;  // as requested
    size_t missing = 0;             // among the distinct keys
    absl::Time deadline;
    absl::Duration timeout;
    bool by_worker = false;
  };
  // Looked up by its key, which never changes while the entry does.
  struct Slot {
    mutable KvEntry::Ptr entry;
  };
  struct SlotHash {
    using is_transparent = void;
    size_t operator()(absl::string_view key) const { return absl::Hash<absl::string_view>()(key); }
    size_t operator()(const Slot& slot) const { return (*this)(slot.entry->key()); }
  };
  struct SlotEq {
    using is_transparent = void;
    static absl::string_view Key(absl::string_view key) { return key; }
    static absl::string_view Key(const Slot& slot) { return slot.entry->key(); }
    template <typename A, typename B>
    bool operator()(const A& a, const B& b) const {
      return Key(a) == Key(b);
    }
  };
  using Slots = absl::flat_hash_set<Slot, SlotHash, SlotEq>;

  // Makes `after` (null: none) the entry of the key found at `at`. Returns the former one.
  KvEntry::Ptr Set(Slots::iterator at, KvEntry::Ptr after);
  KvEntry::Ptr Delete(absl::string_view key) { return Set(entries_.find(key), nullptr); }
  std::optional<v1::OpError> Apply(const v1::KvOp& op, int index, absl::string_view lease_worker,
                                   uint64_t revision, size_t* reply_bytes, v1::KvOpResult* result,
                                   std::vector<KvChange>* changes);
  // One method for each kind of operation.
  std::optional<v1::OpError> Put(const v1::PutOp& put, absl::string_view lease_worker,
                                 uint64_t revision, v1::KvOpResult* result,
                                 std::vector<KvChange>* changes);
  std::optional<v1::OpError> Get(const v1::GetOp& get, size_t* reply_bytes,
                                 v1::KvOpResult* result) const;
  std::optional<v1::OpError> Remove(const v1::DeleteOp& del, uint64_t revision,
                                    v1::KvOpResult* result, std::vector<KvChange>* changes);
  std::optional<v1::OpError> Add(const v1::AddOp& add, uint64_t revision, v1::KvOpResult* result,
                                 std::vector<KvChange>* changes);
  std::optional<v1::OpError> Append(const v1::AppendOp& append, uint64_t revision,
                                    v1::KvOpResult* result, std::vector<KvChange>* changes);
  bool Holds(const v1::Compare& compare) const;
  void Write(absl::string_view key, absl::string_view value, v1::KvClass klass,
             absl::string_view lease_worker, uint64_t revision, std::vector<KvChange>* changes);
  std::vector<std::string> KeysUnder(absl::string_view prefix) const;
  void Undo(size_t first_change, std::vector<KvChange>* changes);
  void ForgetWait(CallId call);

  KvBudget* const budget_;
  size_t bytes_ = 0;  // memory of entries_
  Slots entries_;
  absl::btree_set<std::string> order_;                                     // their keys
  absl::flat_hash_map<std::string, absl::btree_set<std::string>> leased_;  // by worker_id

  absl::Time hold_until_ = absl::InfinitePast();
  absl::flat_hash_map<CallId, Wait> waits_;
  absl::flat_hash_map<std::string, absl::btree_set<CallId>> waiting_for_;  // by key
  absl::btree_set<std::pair<absl::Time, CallId>> deadlines_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_KV_H_
