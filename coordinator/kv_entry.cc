#include "coordinator/kv_entry.h"

#include <cstring>
#include <new>

namespace muster::coordinator {

KvEntry::KvEntry(const Fields& fields)
    : key_bytes_(static_cast<uint32_t>(fields.key.size())),
      value_bytes_(static_cast<uint32_t>(fields.value.size())),
      lease_bytes_(static_cast<uint32_t>(fields.lease_worker_id.size())),
      create_revision_(fields.create_revision),
      mod_revision_(fields.mod_revision),
      version_(fields.version),
      klass_(fields.klass) {}

KvEntry::Ptr KvEntry::Make(const Fields& fields) {
  const absl::string_view texts[] = {fields.key, fields.value, fields.lease_worker_id};
  size_t bytes = sizeof(KvEntry);
  for (const absl::string_view text : texts) bytes += text.size();
  auto* entry = new (::operator new(bytes)) KvEntry(fields);
  char* to = reinterpret_cast<char*>(entry + 1);
  for (const absl::string_view text : texts) {
    if (text.empty()) continue;
    std::memcpy(to, text.data(), text.size());
    to += text.size();
  }
  return Ptr(entry);
}

KvEntry::Ptr KvEntry::Make(const v1::KeyValue& kv) {
  return Make({.key = kv.key(),
               .value = kv.value(),
               .lease_worker_id = kv.lease_worker_id(),
               .create_revision = kv.create_revision(),
               .mod_revision = kv.mod_revision(),
               .version = kv.version(),
               .klass = kv.klass()});
}

void KvEntry::Free(KvEntry* entry) {
  entry->~KvEntry();
  ::operator delete(entry);
}

void KvEntry::CopyTo(v1::KeyValue* kv) const {
  kv->set_key(key().data(), key().size());
  kv->set_value(value().data(), value().size());
  kv->set_create_revision(create_revision_);
  kv->set_mod_revision(mod_revision_);
  kv->set_version(version_);
  kv->set_klass(klass_);
  if (lease_bytes_ > 0) kv->set_lease_worker_id(lease_worker_id().data(), lease_bytes_);
}

}  // namespace muster::coordinator
