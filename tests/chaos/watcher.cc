#include "tests/chaos/watcher.h"

#include <grpcpp/client_context.h>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/watch.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"

namespace muster::chaos {

Watcher::Watcher(const std::string& address, const std::string& job, const std::string& prefix)
    : address_(address), job_(job), prefix_(prefix), thread_([this] { Run(); }) {}

Watcher::~Watcher() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
    if (context_ != nullptr) context_->TryCancel();
    changed_.SignalAll();
  }
  thread_.join();
}

bool Watcher::WaitFor(const std::string& key, int64_t value, absl::Duration timeout) {
  const absl::Time deadline = Clock::Real().Now() + timeout;
  MutexLock lock(&mu_);
  while (seen_[key] < value) {
    const absl::Duration left = deadline - Clock::Real().Now();
    if (left <= absl::ZeroDuration() || !violation_.empty()) return false;
    changed_.WaitWithTimeout(&mu_, left);
  }
  return true;
}

std::string Watcher::violation() const {
  MutexLock lock(&mu_);
  return violation_;
}

int Watcher::streams() const {
  MutexLock lock(&mu_);
  return streams_;
}

bool Watcher::ReadAll(uint64_t* revision) {
  v1::TxnRequest request;
  request.mutable_fence()->set_job_id(job_);
  v1::GetOp& get = *request.add_then()->mutable_get();
  get.set_key(prefix_);
  get.set_prefix(true);
  v1::TxnReply reply;
  grpc::ClientContext context;
  rpc::SetTimeout(context, absl::Seconds(1));
  const auto stub = v1::KeyValueStore::NewStub(*rpc::Connect(address_));
  if (!stub->Txn(&context, request, &reply).ok()) return false;
  *revision = reply.header().revision();
  MutexLock lock(&mu_);
  for (const v1::KvOpResult& result : reply.results()) {
    for (const v1::KeyValue& kv : result.kvs()) {
      int64_t value = -1;
      if (!absl::SimpleAtoi(kv.value(), &value) || value < seen_[kv.key()]) {
        violation_ = absl::StrCat("watch: ", kv.key(), " was seen at ", seen_[kv.key()],
                                  " and is read as ", kv.value());
      }
      seen_[kv.key()] = value;
    }
  }
  changed_.SignalAll();
  return true;
}

void Watcher::Run() {
  const auto stub = v1::Watch::NewStub(*rpc::Connect(address_));
  v1::WatchRequest request;
  request.set_job_id(job_);
  request.set_key_prefix(prefix_);
  request.set_keys(true);
  request.set_from_revision(1);
  uint64_t last_revision = 0;
  for (;;) {
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    {
      MutexLock lock(&mu_);
      if (stop_) return;
      context_ = &context;
      ++streams_;
    }
    const auto reader = stub->Watch(&context, request);
    v1::WatchBatch batch;
    while (reader->Read(&batch)) {
      MutexLock lock(&mu_);
      for (const v1::WatchEvent& event : batch.events()) {
        int64_t value = -1;
        if (!event.has_put() || !absl::SimpleAtoi(event.put().value(), &value) ||
            value != seen_[event.put().key()] + 1 || event.revision() < last_revision) {
          violation_ =
              absl::StrCat("watch: after ", seen_[event.put().key()], " of ", event.put().key(),
                           " (revision ", last_revision, ") came ", event.ShortDebugString());
        }
        seen_[event.put().key()] = value;
        last_revision = event.revision();
      }
      request.set_from_revision(batch.next_revision());
      changed_.SignalAll();
    }
    const absl::Status status = rpc::FromGrpc(reader->Finish());
    // Events that are no longer kept (a coordinator that was restarted keeps none) are read as
    // keys.
    uint64_t revision = 0;
    if (rpc::GetReason(status) == v1::ERROR_REASON_COMPACTED && ReadAll(&revision)) {
      request.set_from_revision(revision + 1);
    }
    MutexLock lock(&mu_);
    context_ = nullptr;
    // The job does not exist before its first worker.
    if (!stop_ && !rpc::IsLost(status) && status.code() != absl::StatusCode::kNotFound &&
        status.code() != absl::StatusCode::kOutOfRange) {
      violation_ = absl::StrCat("watch: ended with ", status.ToString());
      changed_.SignalAll();
    }
    if (!stop_ && status.code() != absl::StatusCode::kOutOfRange) {
      changed_.WaitWithTimeout(&mu_, absl::Milliseconds(20));
    }
  }
}

}  // namespace muster::chaos
