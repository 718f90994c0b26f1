#ifndef MUSTER_COORDINATOR_KV_ENTRY_H_
#define MUSTER_COORDINATOR_KV_ENTRY_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/strings/string_view.h"
#include "proto/muster/v1/kv.pb.h"

namespace muster::coordinator {

// A key as it was written at one revision: what v1::KeyValue says, in one piece of memory. It never
// changes, so the store, the watch history and the changes of an event share it. Not thread-safe,
// not even to copy a Ptr: all that share one belong to the same thread.
class KvEntry {
 public:
  // Counts the references to an entry. May be null.
  class Ptr {
   public:
    Ptr() = default;
    Ptr(std::nullptr_t) {}  // NOLINT: as for the standard's pointers
    Ptr(const Ptr& other) : entry_(other.entry_) {
      if (entry_ != nullptr) ++entry_->references_;
    }
    Ptr(Ptr&& other) noexcept : entry_(std::exchange(other.entry_, nullptr)) {}
    Ptr& operator=(Ptr other) noexcept {
      std::swap(entry_, other.entry_);
      return *this;
    }
    ~Ptr() {
      if (entry_ != nullptr && --entry_->references_ == 0) Free(entry_);
    }

    const KvEntry* get() const { return entry_; }
    const KvEntry* operator->() const { return entry_; }
    const KvEntry& operator*() const { return *entry_; }
    bool operator==(std::nullptr_t) const { return entry_ == nullptr; }

   private:
    friend class KvEntry;
    explicit Ptr(KvEntry* entry) : entry_(entry) {}
    KvEntry* entry_ = nullptr;
  };

  struct Fields {
    absl::string_view key = {};
    absl::string_view value = {};
    absl::string_view lease_worker_id = {};
    uint64_t create_revision = 0;
    uint64_t mod_revision = 0;
    uint64_t version = 0;
    v1::KvClass klass = v1::KV_CLASS_EPHEMERAL;
  };

  // Copies what the views show; the three together are less than 4 GiB.
  static Ptr Make(const Fields& fields);
  static Ptr Make(const v1::KeyValue& kv);
  KvEntry(const KvEntry&) = delete;
  KvEntry& operator=(const KvEntry&) = delete;

  absl::string_view key() const { return {text(), key_bytes_}; }
  absl::string_view value() const { return {text() + key_bytes_, value_bytes_}; }
  absl::string_view lease_worker_id() const {
    return {text() + key_bytes_ + value_bytes_, lease_bytes_};
  }
  uint64_t create_revision() const { return create_revision_; }
  uint64_t mod_revision() const { return mod_revision_; }
  uint64_t version() const { return version_; }
  v1::KvClass klass() const { return klass_; }
  bool durable() const { return klass_ == v1::KV_CLASS_DURABLE; }

  // The bytes of memory that the entry takes.
  size_t bytes() const {
    return sizeof(KvEntry) + size_t{key_bytes_} + value_bytes_ + lease_bytes_;
  }
  void CopyTo(v1::KeyValue* kv) const;

 private:
  explicit KvEntry(const Fields& fields);
  ~KvEntry() = default;
  static void Free(KvEntry* entry);
  const char* text() const { return reinterpret_cast<const char*>(this + 1); }

  uint32_t references_ = 1;
  const uint32_t key_bytes_;
  const uint32_t value_bytes_;
  const uint32_t lease_bytes_;
  const uint64_t create_revision_;
  const uint64_t mod_revision_;
  const uint64_t version_;
  const v1::KvClass klass_;
  // Behind it: key, value, lease_worker_id.
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_KV_ENTRY_H_
