#ifndef MUSTER_COORDINATOR_REMEMBERED_ANSWERS_H_
#define MUSTER_COORDINATOR_REMEMBERED_ANSWERS_H_

#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "coordinator/answer.h"
#include "coordinator/dedupe.h"
#include "proto/muster/v1/fence.pb.h"

namespace muster::coordinator {

struct StoredAnswer {
  std::shared_ptr<const Answer> answer;
  uint64_t durable_revision = 0;  // 0: not in the journal
};

// Hashes everything but the fence, which a retry may bring newer. `kind`: that of the operation.
template <typename Request>
uint64_t HashRequest(const Request& request, int kind) {
  const std::string bytes = request.SerializeAsString();
  // The fence is field 1 and written first: tag, length, body.
  const size_t fence = request.fence().ByteSizeLong();
  size_t skip = 0;
  if (request.has_fence()) {
    skip = 2 + fence;
    for (size_t rest = fence; rest >= 128; rest >>= 7) ++skip;
  }
  return XXH3_64bits_withSeed(bytes.data() + skip, bytes.size() - skip, kind);
}

// The answers that one job has given to requests with a request_id, so that a repeated request has
// no second effect (see Dedupe). A client is a worker, or one process of an operator, which has no
// worker_id. Only the latest kMaxOperators operators are known. Not thread-safe.
class RememberedAnswers {
 public:
  static constexpr size_t kMaxOperators = 1024;

  // See Dedupe.
  RememberedAnswers(size_t keep, size_t keep_bytes) : answers_(keep, keep_bytes) {}

  // Returns whether answers to the client of `fence` are remembered at all.
  static bool CanRemember(const v1::Fence& fence) {
    return fence.request_id() != 0 && (!fence.worker_id().empty() || fence.incarnation() != 0);
  }
  using State = Dedupe<StoredAnswer>::State;
  State Find(const v1::Fence& fence, uint64_t hash, StoredAnswer* answer) const;
  void Remember(const std::string& worker_id, uint64_t incarnation, uint64_t request_id,
                uint64_t hash, StoredAnswer answer);
  // Notes that requests up to `up_to` that are not remembered were answered, as a snapshot says
  // before or after the others.
  void NoteForgotten(const std::string& worker_id, uint64_t incarnation, uint64_t up_to);
  // Notes that requests up to `up_to` were answered, and that the answers are no longer kept.
  void RememberForgotten(const std::string& worker_id, uint64_t incarnation, uint64_t up_to);
  void Forget(absl::string_view worker_id) { answers_.Forget(worker_id); }

  // Calls f(worker_id, incarnation, request_id, hash, const StoredAnswer&); worker_id is empty for
  // an operator.
  template <typename F>
  void ForEach(F f) const {
    answers_.ForEach([&](const std::string& client, uint64_t incarnation, uint64_t request_id,
                         uint64_t hash, const StoredAnswer& stored) {
      f(WorkerOf(client), incarnation, request_id, hash, stored);
    });
  }
  // Calls f(worker_id, incarnation, up_to) for each worker, and no operator, with answers that are
  // kept: the newest.
  template <typename F>
  void ForEachNewestOfWorkers(F f) const {
    answers_.ForEachNewest([&](const std::string& client, uint64_t incarnation, uint64_t up_to) {
      if (!WorkerOf(client).empty()) f(client, incarnation, up_to);
    });
  }
  // Calls f(worker_id, incarnation, up_to).
  template <typename F>
  void ForEachForgotten(F f) const {
    answers_.ForEachForgotten([&](const std::string& client, uint64_t incarnation, uint64_t up_to) {
      f(WorkerOf(client), incarnation, up_to);
    });
  }

 private:
  // A worker's name, or "\n" and the incarnation of an operator's process.
  static std::string ClientOf(const std::string& worker_id, uint64_t incarnation);
  static std::string WorkerOf(const std::string& client) { return client[0] == '\n' ? "" : client; }
  // Drops the oldest operator if `client` is a new one that is one too many.
  void MakeRoom(const std::string& worker_id, const std::string& client);

  Dedupe<StoredAnswer> answers_;
  std::deque<std::string> operators_;  // clients that are no workers, oldest first
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_REMEMBERED_ANSWERS_H_
