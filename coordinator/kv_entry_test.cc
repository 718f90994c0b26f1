#include "coordinator/kv_entry.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace muster::coordinator {
namespace {

TEST(KvEntry, Make_HoldsEveryField_AndCopiesTheText) {
  std::string key("k\0k", 3), value(5000, 'v'), worker("w0");
  const KvEntry::Ptr entry = KvEntry::Make({.key = key,
                                            .value = value,
                                            .lease_worker_id = worker,
                                            .create_revision = 3,
                                            .mod_revision = 5,
                                            .version = 2,
                                            .klass = v1::KV_CLASS_DURABLE});
  const std::string old_key = key;
  key = value = worker = "other";
  EXPECT_EQ(entry->key(), old_key);
  EXPECT_EQ(entry->value(), std::string(5000, 'v'));
  EXPECT_EQ(entry->lease_worker_id(), "w0");
  EXPECT_EQ(entry->create_revision(), 3u);
  EXPECT_EQ(entry->mod_revision(), 5u);
  EXPECT_EQ(entry->version(), 2u);
  EXPECT_TRUE(entry->durable());
  EXPECT_EQ(entry->bytes(), sizeof(KvEntry) + 3 + 5000 + 2);
}

TEST(KvEntry, CopyTo_AndBack_AreTheSame) {
  for (const char* worker : {"", "w7"}) {
    v1::KeyValue kv;
    kv.set_key("key");
    kv.set_value("");
    kv.set_lease_worker_id(worker);
    kv.set_create_revision(1);
    kv.set_mod_revision(9);
    kv.set_version(4);
    kv.set_klass(v1::KV_CLASS_EPHEMERAL);
    v1::KeyValue copy;
    KvEntry::Make(kv)->CopyTo(&copy);
    EXPECT_EQ(copy.SerializeAsString(), kv.SerializeAsString());
  }
}

TEST(KvEntryPtr, LastOneThatGoes_FreesTheEntry) {
  KvEntry::Ptr a = KvEntry::Make({.key = "a"});
  KvEntry::Ptr b = a;
  EXPECT_EQ(a.get(), b.get());
  a = std::move(b);  // both were the same entry
  EXPECT_TRUE(b == nullptr);
  EXPECT_EQ(a->key(), "a");
  KvEntry::Ptr c = std::exchange(a, KvEntry::Make({.key = "b"}));
  EXPECT_EQ(c->key(), "a");
  c = a;
  a = nullptr;
  EXPECT_EQ(c->key(), "b");
  KvEntry::Ptr& self = c;
  c = self;
  EXPECT_EQ(c->key(), "b");
}

}  // namespace
}  // namespace muster::coordinator
