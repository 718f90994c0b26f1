#include "worker/job/coordinator_store.h"

#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "c10/util/Exception.h"
#include "worker/job/coordinator_client.h"

namespace muster {
namespace {

using Bytes = std::vector<uint8_t>;

std::string ToString(const Bytes& bytes) { return std::string(bytes.begin(), bytes.end()); }
Bytes ToBytes(const std::string& text) { return Bytes(text.begin(), text.end()); }

void Require(const absl::Status& status, const std::string& what) {
  if (status.ok()) return;
  C10_THROW_ERROR(DistStoreError,
                  c10::str("coordinator store: ", what, ": ", std::string(status.message())));
}

template <class T>
T Take(absl::StatusOr<T> result, const std::string& what) {
  Require(result.status(), what);
  return *std::move(result);
}

class CoordinatorStore : public c10d::Store {
 public:
  CoordinatorStore(std::shared_ptr<CoordinatorClient> client, std::string prefix,
                   std::chrono::milliseconds timeout)
      : Store(timeout), client_(std::move(client)), prefix_(std::move(prefix)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<CoordinatorStore>(client_, prefix_, timeout_);
  }

  using Store::set;
  void set(const std::string& key, const Bytes& value) override {
    Require(client_->Set(prefix_ + key, ToString(value)), Named("set", key));
  }

  using Store::compareSet;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return ToBytes(Take(client_->CompareSet(prefix_ + key, ToString(expected), ToString(desired)),
                        Named("compareSet", key)));
  }

  Bytes get(const std::string& key) override { return multiGet({key})[0]; }

  int64_t add(const std::string& key, int64_t value) override {
    return Take(client_->Add(prefix_ + key, value), Named("add", key));
  }

  bool deleteKey(const std::string& key) override {
    return Take(client_->Delete(prefix_ + key), Named("deleteKey", key));
  }

  bool check(const std::vector<std::string>& keys) override {
    return Take(client_->AllExist(Prefixed(keys)), Named("check", keys));
  }

  int64_t getNumKeys() override {
    return static_cast<int64_t>(
        Take(client_->List(prefix_, /*keys_only=*/true), "getNumKeys").size());
  }

  std::vector<std::string> listKeys() override {
    std::vector<std::string> keys;
    for (const auto& entry : Take(client_->List(prefix_, /*keys_only=*/true), "listKeys")) {
      keys.push_back(entry.first.substr(prefix_.size()));
    }
    return keys;
  }

  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }

  void wait(const std::vector<std::string>& keys,
            const std::chrono::milliseconds& timeout) override {
    WaitFor("wait", keys, timeout);
  }

  void append(const std::string& key, const Bytes& value) override {
    Require(client_->Append(prefix_ + key, ToString(value)), Named("append", key));
  }

  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override {
    std::vector<Bytes> values;
    for (const std::string& value : WaitFor("get", keys, timeout_)) {
      values.push_back(ToBytes(value));
    }
    return values;
  }

  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override {
    TORCH_CHECK(keys.size() == values.size(), "coordinator store: multiSet of ", keys.size(),
                " keys and ", values.size(), " values");
    std::vector<std::pair<std::string, std::string>> entries;
    for (size_t i = 0; i < keys.size(); ++i) {
      entries.emplace_back(prefix_ + keys[i], ToString(values[i]));
    }
    Require(client_->SetAll(entries), Named("multiSet", keys));
  }

  bool hasExtendedApi() const override { return true; }

 private:
  std::vector<std::string> WaitFor(const char* what, const std::vector<std::string>& keys,
                                   std::chrono::milliseconds timeout) {
    // c10d: no timeout means the longest one.
    const absl::Duration span =
        timeout == kNoTimeout ? absl::Hours(24 * 365) : absl::FromChrono(timeout);
    return Take(client_->Wait(Prefixed(keys), span), Named(what, keys));
  }

  std::vector<std::string> Prefixed(const std::vector<std::string>& keys) const {
    std::vector<std::string> result;
    result.reserve(keys.size());
    for (const std::string& key : keys) result.push_back(prefix_ + key);
    return result;
  }

  static std::string Named(const char* what, const std::string& key) {
    return c10::str(what, "('", key, "')");
  }
  static std::string Named(const char* what, const std::vector<std::string>& keys) {
    if (keys.empty()) return what;
    return keys.size() == 1 ? Named(what, keys[0])
                            : c10::str(what, "('", keys[0], "' and ", keys.size() - 1, " more)");
  }

  const std::shared_ptr<CoordinatorClient> client_;
  const std::string prefix_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> MakeCoordinatorStore(std::shared_ptr<CoordinatorClient> client,
                                                     std::string prefix) {
  TORCH_CHECK(client, "MakeCoordinatorStore: no client");
  return c10::make_intrusive<CoordinatorStore>(std::move(client), std::move(prefix),
                                               c10d::Store::kDefaultTimeout);
}

}  // namespace muster
