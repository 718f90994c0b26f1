#include "coordinator/kv.h"

#include <algorithm>
#include <limits>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

// The most bytes that the operations of one transaction may write, all of which stay in memory
// until it ends: an append of one byte writes the whole value.
constexpr size_t kMaxWrittenBytes = 64 << 20;

std::optional<v1::OpError> CheckKey(absl::string_view key, absl::string_view where) {
  if (key.empty())
    return BadField(where, absl::StrCat(where, " is empty: a key has 1 to 1024 bytes"));
  if (key.size() > KvStore::kMaxKey) {
    return TooLarge(where, absl::StrCat(where, " ", Quoted(key), " has ", key.size(),
                                        " bytes: at most 1024; put a hash in its place"));
  }
  return std::nullopt;
}

std::optional<v1::OpError> CheckValue(size_t size, absl::string_view key) {
  if (size <= KvStore::kMaxValue) return std::nullopt;
  return TooLarge(
      "value", absl::StrCat("the value of ", Quoted(key), " would have ", size, " bytes: at most ",
                            KvStore::kMaxValue, "; store a path to a file in its place"));
}

// Waits for these keys are answered with all of their values, which must fit into one message.
template <typename Keys>
std::optional<v1::OpError> CheckValuesFit(const KvStore& store, const Keys& keys) {
  size_t bytes = 0;
  for (const std::string& key : keys) {
    if (const auto& entry = store.Find(key)) bytes += 64 + key.size() + entry->value().size();
  }
  if (bytes <= KvStore::kMaxAnswerBytes) return std::nullopt;
  return TooLarge("keys", absl::StrCat("the values of the ", keys.size(), " keys waited for have ",
                                       bytes, " bytes, more than the ", KvStore::kMaxAnswerBytes,
                                       " of one answer: wait for fewer at a time"));
}

}  // namespace

KvEntry::Ptr KvStore::Set(Slots::iterator at, KvEntry::Ptr after) {
  const absl::string_view new_lease = after != nullptr ? after->lease_worker_id() : "";
  KvEntry::Ptr before;
  if (at == entries_.end()) {
    if (after == nullptr) return nullptr;
    order_.emplace(after->key());
    at = entries_.insert({after}).first;
  } else {
    before = std::exchange(at->entry, after);
    if (after == nullptr) {
      order_.erase(before->key());
      entries_.erase(at);
    }
  }
  const size_t more = after != nullptr ? after->bytes() : 0;
  const size_t less = before != nullptr ? before->bytes() : 0;
  bytes_ += more - less;
  if (budget_ != nullptr) budget_->used += more - less;
  const absl::string_view old_lease = before != nullptr ? before->lease_worker_id() : "";
  if (old_lease != new_lease) {
    if (!old_lease.empty()) {
      const auto it = leased_.find(old_lease);
      it->second.erase(before->key());
      if (it->second.empty()) leased_.erase(it);
    }
    if (!new_lease.empty()) leased_[new_lease].emplace(after->key());
  }
  return before;
}

bool KvStore::Holds(const v1::Compare& compare) const {
  const KvEntry* const kv = Find(compare.key());
  switch (compare.target()) {
    case v1::Compare::EXISTS:
      return (kv != nullptr) == (compare.number() != 0);
    case v1::Compare::VALUE:
      return kv != nullptr && kv->value() == compare.value();
    case v1::Compare::VERSION:
      return (kv != nullptr ? kv->version() : 0) == compare.number();
    case v1::Compare::CREATE_REVISION:
      return (kv != nullptr ? kv->create_revision() : 0) == compare.number();
    case v1::Compare::LEASE:
      return kv != nullptr && kv->lease_worker_id() == compare.value();
    case v1::Compare::MOD_REVISION:
      return (kv != nullptr ? kv->mod_revision() : 0) == compare.number();
    default:
      return false;
  }
}

void KvStore::Write(absl::string_view key, absl::string_view value, v1::KvClass klass,
                    absl::string_view lease_worker, uint64_t revision,
                    std::vector<KvChange>* changes) {
  const auto at = entries_.find(key);
  const KvEntry* const before = at != entries_.end() ? at->entry.get() : nullptr;
  KvEntry::Ptr after =
      KvEntry::Make({.key = key,
                     .value = value,
                     .lease_worker_id = lease_worker,
                     .create_revision = before != nullptr ? before->create_revision() : revision,
                     .mod_revision = revision,
                     .version = before != nullptr ? before->version() + 1 : 1,
                     .klass = klass == v1::KV_CLASS_DURABLE ? klass : v1::KV_CLASS_EPHEMERAL});
  changes->push_back({Set(at, after), after});
}

std::optional<v1::OpError> KvStore::Put(const v1::PutOp& put, absl::string_view lease_worker,
                                        uint64_t revision, v1::KvOpResult* result,
                                        std::vector<KvChange>* changes) {
  if (auto error = CheckKey(put.key(), "put.key")) return error;
  if (auto error = CheckValue(put.value().size(), put.key())) return error;
  if (put.with_lease() && put.klass() == v1::KV_CLASS_DURABLE) {
    return BadField("put.with_lease",
                    absl::StrCat("key ", Quoted(put.key()),
                                 " is durable and cannot be tied to a lease: choose one"));
  }
  if (put.with_lease() && lease_worker.empty()) {
    return BadField(
        "put.with_lease",
        absl::StrCat("key ", Quoted(put.key()),
                     " is to be tied to a lease, but its writer is not a seated worker"));
  }
  Write(put.key(), put.value(), put.klass(), put.with_lease() ? lease_worker : absl::string_view(),
        revision, changes);
  result->set_mod_revision(revision);
  return std::nullopt;
}

std::optional<v1::OpError> KvStore::Get(const v1::GetOp& get, size_t* reply_bytes,
                                        v1::KvOpResult* result) const {
  const auto add = [&](const KvEntry& entry) {
    v1::KeyValue* out = result->add_kvs();
    entry.CopyTo(out);
    if (get.keys_only()) out->clear_value();
    *reply_bytes += 64 + out->key().size() + out->value().size();
  };
  if (!get.prefix()) {
    if (auto error = CheckKey(get.key(), "get.key")) return error;
    if (const KvEntry* entry = Find(get.key())) add(*entry);
    if (*reply_bytes <= kMaxAnswerBytes) return std::nullopt;
    return TooLarge("get.key", absl::StrCat("the values up to that of ", Quoted(get.key()),
                                            " have more than the ", kMaxAnswerBytes,
                                            " bytes of one answer: get fewer at a time"));
  }
  if (get.key().size() > kMaxKey) return CheckKey(get.key(), "get.key");
  if (get.after().size() > kMaxKey) return CheckKey(get.after(), "get.after");
  const int limit = get.limit() > 0 ? std::min(get.limit(), kDefaultGetLimit) : kDefaultGetLimit;
  auto it = get.after().empty() || get.after() < get.key() ? order_.lower_bound(get.key())
                                                           : order_.upper_bound(get.after());
  for (; it != order_.end() && absl::StartsWith(*it, get.key()); ++it) {
    const KvEntry& entry = *Find(*it);
    const size_t value = get.keys_only() ? 0 : entry.value().size();
    const bool full = *reply_bytes + 64 + it->size() + value > kMaxReplyBytes;
    if (result->kvs_size() >= limit || full) {
      result->set_more(true);
      break;
    }
    add(entry);
  }
  return std::nullopt;
}

std::optional<v1::OpError> KvStore::Remove(const v1::DeleteOp& del, uint64_t revision,
                                           v1::KvOpResult* result, std::vector<KvChange>* changes) {
  if (!del.prefix()) {
    if (auto error = CheckKey(del.key(), "delete.key")) return error;
    if (KvEntry::Ptr before = Delete(del.key()); before != nullptr) {
      changes->push_back({std::move(before), nullptr});
      result->set_number(1);
      result->set_mod_revision(revision);
    }
    return std::nullopt;
  }
  if (del.key().size() > kMaxKey) return CheckKey(del.key(), "delete.key");
  const std::vector<std::string> keys = KeysUnder(del.key());
  for (const std::string& key : keys) changes->push_back({Delete(key), nullptr});
  result->set_number(static_cast<int64_t>(keys.size()));
  if (!keys.empty()) result->set_mod_revision(revision);
  return std::nullopt;
}

std::optional<v1::OpError> KvStore::Add(const v1::AddOp& add, uint64_t revision,
                                        v1::KvOpResult* result, std::vector<KvChange>* changes) {
  if (auto error = CheckKey(add.key(), "add.key")) return error;
  const KvEntry* const before = Find(add.key());
  int64_t number = 0;
  if (before != nullptr && !absl::SimpleAtoi(before->value(), &number)) {
    return BadField("add.key",
                    absl::StrCat("key ", Quoted(add.key()), " holds ", before->value().size(),
                                 " bytes that are not a decimal number: put one first"));
  }
  if (__builtin_add_overflow(number, add.delta(), &number)) {
    return BadField("add.delta",
                    absl::StrCat("key ", Quoted(add.key()), " holds ", before->value(),
                                 " and adding ", add.delta(), " leaves the range of 64 bits"));
  }
  v1::KvClass klass = add.klass();
  if (klass == v1::KV_CLASS_UNSPECIFIED && before != nullptr) klass = before->klass();
  const absl::string_view lease = before != nullptr ? before->lease_worker_id() : "";
  Write(add.key(), absl::StrCat(number), klass, klass == v1::KV_CLASS_DURABLE ? "" : lease,
        revision, changes);
  result->set_number(number);
  result->set_mod_revision(revision);
  return std::nullopt;
}

std::optional<v1::OpError> KvStore::Append(const v1::AppendOp& append, uint64_t revision,
                                           v1::KvOpResult* result, std::vector<KvChange>* changes) {
  if (auto error = CheckKey(append.key(), "append.key")) return error;
  const KvEntry* const before = Find(append.key());
  const size_t size = (before != nullptr ? before->value().size() : 0) + append.value().size();
  if (auto error = CheckValue(size, append.key())) return error;
  v1::KvClass klass = append.klass();
  if (klass == v1::KV_CLASS_UNSPECIFIED && before != nullptr) klass = before->klass();
  const absl::string_view lease = before != nullptr ? before->lease_worker_id() : "";
  Write(append.key(), absl::StrCat(before != nullptr ? before->value() : "", append.value()), klass,
        klass == v1::KV_CLASS_DURABLE ? "" : lease, revision, changes);
  result->set_number(static_cast<int64_t>(size));
  result->set_mod_revision(revision);
  return std::nullopt;
}

std::optional<v1::OpError> KvStore::Apply(const v1::KvOp& op, int index,
                                          absl::string_view lease_worker, uint64_t revision,
                                          size_t* reply_bytes, v1::KvOpResult* result,
                                          std::vector<KvChange>* changes) {
  switch (op.kind_case()) {
    case v1::KvOp::kPut:
      return Put(op.put(), lease_worker, revision, result, changes);
    case v1::KvOp::kGet:
      return Get(op.get(), reply_bytes, result);
    case v1::KvOp::kDelete:
      return Remove(op.delete_(), revision, result, changes);
    case v1::KvOp::kAdd:
      return Add(op.add(), revision, result, changes);
    case v1::KvOp::kAppend:
      return Append(op.append(), revision, result, changes);
    case v1::KvOp::KIND_NOT_SET:
      break;
  }
  return BadField("kind", absl::StrCat("operation ", index,
                                       " of the transaction has no kind this server knows"));
}

std::optional<v1::OpError> KvStore::Txn(const v1::TxnRequest& request,
                                        absl::string_view lease_worker, uint64_t revision,
                                        v1::TxnReply* reply, std::vector<KvChange>* changes) {
  const std::pair<const char*, int> sizes[] = {{"compares", request.compares_size()},
                                               {"then", request.then_size()},
                                               {"otherwise", request.otherwise_size()}};
  for (const auto& [name, size] : sizes) {
    if (size > kMaxOps) {
      return TooLarge(name, absl::StrCat("a transaction has at most ", kMaxOps, " entries in ",
                                         name, ", not ", size));
    }
  }
  bool holds = true;
  for (const v1::Compare& compare : request.compares()) {
    if (auto error = CheckKey(compare.key(), "compares.key")) return error;
    if (compare.target() == v1::Compare::TARGET_UNSPECIFIED ||
        !v1::Compare::Target_IsValid(compare.target())) {
      return BadField("compares.target", absl::StrCat("the comparison of ", Quoted(compare.key()),
                                                      " names no target this server knows"));
    }
    holds = holds && Holds(compare);
  }
  reply->set_succeeded(holds);
  size_t reply_bytes = 0, written = 0;
  int index = 0;
  const size_t first_change = changes->size();
  const size_t bytes_before = bytes_;
  for (const v1::KvOp& op : holds ? request.then() : request.otherwise()) {
    const size_t change = changes->size();
    auto error =
        Apply(op, index++, lease_worker, revision, &reply_bytes, reply->add_results(), changes);
    for (size_t i = change; i < changes->size(); ++i) {
      if ((*changes)[i].after != nullptr) written += (*changes)[i].after->bytes();
    }
    if (!error.has_value() && written > kMaxWrittenBytes) {
      error =
          TooLarge("append", absl::StrCat("the first ", index, " operations of the transaction ",
                                          "write ", written, " bytes, with what they append ",
                                          "to: at most ", kMaxWrittenBytes,
                                          "; join what is appended to one key, or use several "
                                          "transactions"));
    }
    if (error.has_value()) {
      Undo(first_change, changes);
      return error;
    }
  }
  if (budget_ != nullptr && bytes_ > bytes_before &&
      (bytes_ > budget_->of_job || budget_->used > budget_->of_all)) {
    const bool of_job = bytes_ > budget_->of_job;
    const size_t bytes = of_job ? bytes_ : budget_->used;
    Undo(first_change, changes);
    return MakeError(
        absl::StatusCode::kResourceExhausted, v1::ERROR_REASON_LIMIT,
        absl::StrCat("the keys of ", of_job ? "this job" : "all jobs", " would have ", bytes >> 20,
                     " MiB, more than ", (of_job ? budget_->of_job : budget_->of_all) >> 20,
                     ": nothing was written; delete keys, ", of_job ? "" : "remove jobs, ",
                     "or store paths to files in place of values"));
  }
  // A key that comes again was written or deleted by this transaction before.
  if (std::any_of(changes->begin() + first_change, changes->end(), [revision](const KvChange& one) {
        return one.after == nullptr ||
               (one.before != nullptr && one.before->mod_revision() == revision);
      })) {
    // Keeps one entry for each key: what it was before, and what it is now.
    absl::flat_hash_map<std::string, size_t> at;
    std::vector<KvChange> merged;
    for (size_t i = first_change; i < changes->size(); ++i) {
      KvChange& change = (*changes)[i];
      const auto [it, is_new] = at.try_emplace(std::string(change.key()), merged.size());
      if (is_new) {
        merged.push_back(std::move(change));
      } else {
        merged[it->second].after = std::move(change.after);
      }
    }
    changes->resize(first_change);
    for (KvChange& change : merged) {
      if (change.before != nullptr || change.after != nullptr)
        changes->push_back(std::move(change));
    }
  }
  return std::nullopt;
}

void KvStore::Undo(size_t first_change, std::vector<KvChange>* changes) {
  while (changes->size() > first_change) {
    KvChange& change = changes->back();
    const auto at = entries_.find(change.key());
    Set(at, std::move(change.before));
    changes->pop_back();
  }
}

bool KvStore::Reads(const v1::TxnRequest& request) {
  if (request.compares_size() > 0) return true;
  for (const v1::KvOp& op : request.then()) {
    if (op.kind_case() != v1::KvOp::kPut) return true;
  }
  return false;
}

bool KvStore::Writes(const v1::TxnRequest& request) {
  const auto writes = [](const v1::KvOp& op) { return op.kind_case() != v1::KvOp::kGet; };
  return std::any_of(request.then().begin(), request.then().end(), writes) ||
         std::any_of(request.otherwise().begin(), request.otherwise().end(), writes);
}

void KvStore::DropLease(absl::string_view worker_id, std::vector<KvChange>* changes) {
  const auto it = leased_.find(worker_id);
  if (it == leased_.end()) return;
  const absl::btree_set<std::string> keys = it->second;
  for (const std::string& key : keys) changes->push_back({Delete(key), nullptr});
}

void KvStore::DropPrefix(absl::string_view prefix, std::vector<KvChange>* changes) {
  for (const std::string& key : KeysUnder(prefix)) changes->push_back({Delete(key), nullptr});
}

std::vector<std::string> KvStore::KeysUnder(absl::string_view prefix) const {
  std::vector<std::string> keys;
  for (auto it = order_.lower_bound(prefix); it != order_.end() && absl::StartsWith(*it, prefix);
       ++it) {
    keys.push_back(*it);
  }
  return keys;
}

void KvStore::RestorePut(const v1::KeyValue& kv) {
  Set(entries_.find(kv.key()), KvEntry::Make(kv));
}
void KvStore::RestoreDelete(absl::string_view key) { Delete(key); }

void KvStore::RaiseVersions(uint64_t by) {
  for (const Slot& slot : entries_) {
    const KvEntry& entry = *slot.entry;
    slot.entry = KvEntry::Make({.key = entry.key(),
                                .value = entry.value(),
                                .lease_worker_id = entry.lease_worker_id(),
                                .create_revision = entry.create_revision(),
                                .mod_revision = entry.mod_revision(),
                                .version = entry.version() + by,
                                .klass = entry.klass()});
  }
}

std::optional<v1::OpError> KvStore::CheckWait(const v1::WaitRequest& request) const {
  if (request.keys_size() == 0) return BadField("keys", "a wait names at least one key");
  if (request.keys_size() > kMaxWaitKeys) {
    return TooLarge("keys", absl::StrCat("a wait names at most ", kMaxWaitKeys, " keys, not ",
                                         request.keys_size()));
  }
  for (const std::string& key : request.keys()) {
    if (auto error = CheckKey(key, "keys")) return error;
  }
  if (!request.has_timeout() || FromProto(request.timeout()) <= absl::ZeroDuration()) {
    v1::OpError error =
        MakeError(absl::StatusCode::kInvalidArgument, v1::ERROR_REASON_DEADLINE_REQUIRED,
                  absl::StrCat("the wait for ", Quoted(request.keys(0)),
                               " has no positive timeout: set one"));
    error.mutable_detail()->set_field("timeout");
    return error;
  }
  return CheckValuesFit(*this, request.keys());
}

bool KvStore::StartWait(CallId call, const v1::WaitRequest& request, absl::Time now,
                        v1::WaitReply* reply) {
  absl::flat_hash_set<std::string> missing;
  for (const std::string& key : request.keys()) {
    if (!entries_.contains(key)) missing.insert(key);
  }
  if (missing.empty()) {
    for (const std::string& key : request.keys()) Find(key)->CopyTo(reply->add_kvs());
    return true;
  }
  Wait wait;
  wait.keys.assign(request.keys().begin(), request.keys().end());
  wait.missing = missing.size();
  wait.timeout = FromProto(request.timeout());
  const absl::Duration least = std::max(kLeastRest, hold_until_ - now);
  wait.deadline = now + RestOf(wait.timeout, request.waited(), least);
  wait.by_worker = !request.fence().worker_id().empty();
  // Watches every key, also those that exist now: they may be deleted before the last one comes.
  for (const std::string& key : wait.keys) waiting_for_[key].insert(call);
  deadlines_.insert({wait.deadline, call});
  waits_.insert_or_assign(call, std::move(wait));
  return false;
}

void KvStore::ForgetWait(CallId call) {
  const auto it = waits_.find(call);
  if (it == waits_.end()) return;
  for (const std::string& key : it->second.keys) {
    const auto at = waiting_for_.find(key);
    if (at == waiting_for_.end()) continue;
    at->second.erase(call);
    if (at->second.empty()) waiting_for_.erase(at);
  }
  deadlines_.erase({it->second.deadline, call});
  waits_.erase(it);
}

void KvStore::AbandonWait(CallId call) { ForgetWait(call); }

void KvStore::TakeReady(const std::vector<KvChange>& changes, std::vector<Ready>* ready) {
  if (waits_.empty()) return;
  std::vector<CallId> done;
  for (const KvChange& change : changes) {
    const bool existed = change.before != nullptr;
    const bool exists = change.after != nullptr;
    if (existed == exists) continue;
    const auto at = waiting_for_.find(change.key());
    if (at == waiting_for_.end()) continue;
    for (const CallId call : at->second) {
      Wait& wait = waits_.find(call)->second;
      if (exists) {
        if (--wait.missing == 0) done.push_back(call);
      } else {
        ++wait.missing;
      }
    }
  }
  std::shared_ptr<const v1::WaitReply> last;
  std::optional<v1::OpError> last_error;
  std::vector<std::string> last_keys;
  for (const CallId call : done) {
    const auto it = waits_.find(call);
    // A later change of the same event may have taken a key away again.
    if (it == waits_.end() || it->second.missing != 0) continue;
    if (last_keys != it->second.keys) {
      last_keys = it->second.keys;
      last = nullptr;
      last_error = CheckValuesFit(*this, last_keys);
      if (!last_error.has_value()) {
        auto reply = std::make_shared<v1::WaitReply>();
        for (const std::string& key : last_keys) Find(key)->CopyTo(reply->add_kvs());
        last = std::move(reply);
      }
    }
    ready->push_back({call, last, last_error.value_or(v1::OpError())});
    ForgetWait(call);
  }
}

void KvStore::TakeExpired(absl::Time now, std::vector<Ready>* ready) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const CallId call = deadlines_.begin()->second;
    const Wait& wait = waits_.find(call)->second;
    std::string missing;
    for (const std::string& key : wait.keys) {
      if (!entries_.contains(key)) {
        missing = key;
        break;
      }
    }
    ready->push_back(
        {call, nullptr,
         MakeError(absl::StatusCode::kDeadlineExceeded, v1::ERROR_REASON_WAIT_TIMEOUT,
                   absl::StrCat("key ", Quoted(missing), " was not set within ",
                                absl::FormatDuration(wait.timeout), " (", wait.missing, " of ",
                                wait.keys.size(),
                                " keys missing): check whether the rank that sets it is alive"))});
    ForgetWait(call);
  }
}

std::vector<CallId> KvStore::TakeWaits(bool only_workers) {
  std::vector<CallId> calls;
  for (const auto& [call, wait] : waits_) {
    if (wait.by_worker || !only_workers) calls.push_back(call);
  }
  std::sort(calls.begin(), calls.end());
  for (const CallId call : calls) ForgetWait(call);
  return calls;
}

absl::Time KvStore::NextDeadline() const {
  return deadlines_.empty() ? absl::InfiniteFuture() : deadlines_.begin()->first;
}

}  // namespace muster::coordinator
