#include "coordinator/remembered_answers.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

constexpr size_t kStoredAnswerBytes = 128;  // of memory, besides the answer's own bytes

}  // namespace

std::string RememberedAnswers::ClientOf(const std::string& worker_id, uint64_t incarnation) {
  return worker_id.empty() ? absl::StrCat("\n", incarnation) : worker_id;
}

RememberedAnswers::State RememberedAnswers::Find(const v1::Fence& fence, uint64_t hash,
                                                 StoredAnswer* answer) const {
  return answers_.Find(ClientOf(fence.worker_id(), fence.incarnation()), fence.incarnation(),
                       fence.request_id(), hash, answer);
}

void RememberedAnswers::Remember(const std::string& worker_id, uint64_t incarnation,
                                 uint64_t request_id, uint64_t hash, StoredAnswer answer) {
  const std::string client = ClientOf(worker_id, incarnation);
  MakeRoom(worker_id, client);
  const size_t bytes = kStoredAnswerBytes + answer.answer->bytes().size();
  answers_.Store(client, incarnation, request_id, hash, std::move(answer), bytes);
}

void RememberedAnswers::NoteForgotten(const std::string& worker_id, uint64_t incarnation,
                                      uint64_t up_to) {
  const std::string client = ClientOf(worker_id, incarnation);
  MakeRoom(worker_id, client);
  answers_.NoteForgotten(client, incarnation, up_to);
}

void RememberedAnswers::RememberForgotten(const std::string& worker_id, uint64_t incarnation,
                                          uint64_t up_to) {
  const std::string client = ClientOf(worker_id, incarnation);
  MakeRoom(worker_id, client);
  answers_.ForgetUpTo(client, incarnation, up_to);
}

void RememberedAnswers::MakeRoom(const std::string& worker_id, const std::string& client) {
  if (!worker_id.empty() || answers_.Knows(client)) return;
  operators_.push_back(client);
  if (operators_.size() <= kMaxOperators) return;
  answers_.Forget(operators_.front());
  operators_.pop_front();
}

}  // namespace muster::coordinator
