#ifndef MUSTER_AGENT_FAKE_SESSIONS_H_
#define MUSTER_AGENT_FAKE_SESSIONS_H_

#include <grpcpp/server_context.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "google/protobuf/descriptor.h"
#include "proto/muster/v1/session.grpc.pb.h"

namespace muster::agent {

// The end of the agents' streams at a coordinator or a hub: welcomes every agent, answers each
// operation by `answer`, or with an empty result of its kind, and sends what the test requests.
// Thread-safe.
class FakeSessions final : public v1::Session::Service {
 public:
  // Fills in the answer to an operation; returns false if it is not answered. Called under a lock.
  using Answer = std::function<bool(const v1::Op&, v1::OpResult*)>;
  void SetAnswer(Answer answer) {
    MutexLock lock(&mu_);
    answer_ = std::move(answer);
  }

  grpc::Status Attach(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::CoordinatorFrame, v1::AgentFrame>* stream) override {
    {
      MutexLock lock(&mu_);
      peers_.push_back(context->peer());
    }
    v1::AgentFrame frame;
    uint64_t seq = 0;
    while (stream->Read(&frame)) {
      v1::CoordinatorFrame reply;
      if (frame.has_hello()) {
        reply.mutable_welcome()->set_protocol(1);
        reply.mutable_welcome()->set_term(1);
        // Long, because a busy machine is slow.
        reply.mutable_welcome()->mutable_lease()->set_seconds(60);
        // Each stream begins a new session.
        reply.mutable_welcome()->set_session_id(
            absl::StrCat("s", frame.hello().node(), "/", NextSession()));
        stream->Write(reply);
      }
      if (frame.has_ops()) {
        for (const v1::Op& op : frame.ops().ops()) {
          v1::OpResult result;
          result.set_op_id(op.op_id());
          const auto* const kind = v1::OpResult::descriptor()->FindFieldByNumber(
              op.has_arrive_many() ? static_cast<int>(v1::Op::kArrive) : op.kind_case());
          result.GetReflection()->MutableMessage(&result, kind);
          if (!Fill(op, &result)) continue;
          *reply.mutable_results()->add_results() = std::move(result);
        }
        if (reply.has_results()) {
          reply.set_seq(++seq);
          stream->Write(reply);
        }
      }
      if (frame.has_beat()) stream->Write(v1::CoordinatorFrame());  // an acknowledgement
      MutexLock lock(&mu_);
      if (frame.has_ops() && !goodbye_.empty()) {
        v1::CoordinatorFrame goodbye;
        goodbye.mutable_goodbye()->set_reason(goodbye_);
        goodbye.mutable_goodbye()->set_final(true);
        stream->Write(goodbye);
      }
      frames_.push_back(frame);
      changed_.SignalAll();
      if (frame.has_bye()) break;
      while (!directives_.empty()) {
        v1::CoordinatorFrame directive;
        directive.set_seq(++seq);
        *directive.mutable_directive() = directives_.front();
        directives_.pop_front();
        stream->Write(directive);
      }
    }
    return grpc::Status::OK;
  }

  // Sends the directive after the agent's next frame.
  void Say(v1::Directive directive) {
    MutexLock lock(&mu_);
    directives_.push_back(std::move(directive));
  }
  // After an agent's first operations, announces that this end shuts down permanently.
  void SayGoodbye(const std::string& why) {
    MutexLock lock(&mu_);
    goodbye_ = why;
  }
  // Blocks until a frame matches `wanted`, and returns it.
  v1::AgentFrame WaitFor(const std::function<bool(const v1::AgentFrame&)>& wanted) {
    MutexLock lock(&mu_);
    for (;;) {
      for (const v1::AgentFrame& frame : frames_) {
        if (wanted(frame)) return frame;
      }
      changed_.Wait(&mu_);
    }
  }

  // The peer of each stream's connection.
  std::vector<std::string> peers() {
    MutexLock lock(&mu_);
    return peers_;
  }

 private:
  bool Fill(const v1::Op& op, v1::OpResult* result) {
    MutexLock lock(&mu_);
    return !answer_ || answer_(op, result);
  }
  int NextSession() {
    MutexLock lock(&mu_);
    return ++sessions_;
  }

  Mutex mu_;
  CondVar changed_;
  Answer answer_ ABSL_GUARDED_BY(mu_);
  int sessions_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<v1::AgentFrame> frames_ ABSL_GUARDED_BY(mu_);
  std::vector<std::string> peers_ ABSL_GUARDED_BY(mu_);
  std::string goodbye_ ABSL_GUARDED_BY(mu_);
  std::deque<v1::Directive> directives_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_FAKE_SESSIONS_H_
