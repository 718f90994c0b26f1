// Feeds the agent's stream and its relay core with anything that a hostile, broken or newer
// coordinator may send, and checks rules that must hold anyway.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/fake_outgoing_stream.h"
#include "agent/relay_core.h"
#include "agent/session_client.h"
#include "base/fake_clock.h"
#include "base/mutate.h"
#include "proto/random_message.h"

namespace muster::agent {
namespace {

// Messages with names and numbers that two of them may share.
class Fuzzer final : public RandomMessage {
 public:
  using RandomMessage::RandomMessage;

  uint64_t next_seq = 1;       // the coordinator's
  std::vector<uint64_t> ops;   // sent to the coordinator
  std::string session = "s1";  // the session of its welcome
  uint64_t sent_seq = 0;       // the agent's last frame

 private:
  std::string Text(const std::string& name) override {
    if (name == "job_id") return Draw(3) == 0 ? "k" : "j";
    if (name == "worker_id") return absl::StrCat("w", Draw(4));
    if (name == "barrier_id") return Draw(2) == 0 ? "b" : "c";
    if (name == "address") {
      const char* const addresses[] = {"10.0.0.2:1", "10.0.0.3:1", "10.0.0.4:1", "10.0.0.9:1",
                                       "somewhere"};
      return addresses[Draw(5)];
    }
    if (name == "node") return Draw(8) == 0 ? "node" : absl::StrCat("hub", Draw(3));
    if (name == "cluster_id") return Draw(20) == 0 ? "d" : "c";
    if (name == "session_id") return Draw(3) == 0 ? absl::StrCat("s", Draw(3)) : session;
    return RandomMessage::Text(name);
  }
  int64_t Number(const std::string& name) override {
    if (Draw(40) == 0) return RandomMessage::Number(name);
    if (name == "op_id") {
      return static_cast<int64_t>(ops.empty() || Draw(5) == 0 ? Draw(2000) : ops[Draw(ops.size())]);
    }
    if (name == "seq") return static_cast<int64_t>(Draw(8) == 0 ? Draw(next_seq + 3) : next_seq++);
    if (name == "ack" || name == "last_received_seq") {
      return static_cast<int64_t>(Draw(8) == 0 ? Draw(sent_seq + 10) : sent_seq);
    }
    if (name == "protocol") return Draw(10) == 0 ? 2 : 1;
    if (name == "term") return static_cast<int64_t>(Draw(3));
    if (name == "reason") return static_cast<int64_t>(Draw(30));
    return RandomMessage::Number(name);
  }
};

class StreamFuzzTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(StreamFuzzTest, AnyFrames_EveryCallEndsOnce) {
  Fuzzer fuzz(GetParam());
  FakeClock clock;
  FakeStreamOpener transport;
  int connected = 0, directives = 0;
  RelayCore* core_of_stream = nullptr;

  SessionClient::Options options;
  options.node = "node";
  options.address = "10.0.0.1:29400";
  options.incarnation = 7;
  options.max_held_ops = 200;
  options.max_held_bytes = 1 << 20;
  options.frame_bytes = 2000;
  options.clock = &clock;
  options.random = [&fuzz] { return static_cast<double>(fuzz.Draw(1000)) / 1000; };
  options.beat = [&] { return core_of_stream->MakeBeat(); };
  options.on_connected = [&](uint64_t term, bool) {
    ++connected;
    core_of_stream->Connected(term);
  };
  options.on_directive = [&](const v1::Directive& directive) {
    ++directives;
    core_of_stream->GenerationEnded(directive.generation_ended());
    core_of_stream->ProcessOf(directive.collect_stack().job_id(),
                              directive.collect_stack().worker_id(),
                              directive.collect_stack().pid());
  };
  auto client = std::make_unique<SessionClient>(options, &transport);
  client->OfferHub("10.0.0.9:1");
  RelayCore::Options core_options;
  core_options.node = "node";
  core_options.incarnation = 7;
  core_options.process_state = [&fuzz](int64_t) -> std::string {
    const char* const states[] = {"running", "stopped", "zombie", "gone", ""};
    return states[fuzz.Draw(5)];
  };
  core_options.connected = [&] { return client->connected(); };
  core_options.clock = &clock;
  RelayCore core(std::move(core_options), client.get());
  core_of_stream = &core;

  std::map<int, int> answered;  // by call
  std::set<int> waiting;
  std::vector<std::pair<int, uint64_t>> forgettable;
  int calls = 0, results_of_wrong_kind = 0;
  const std::function<void()> submit = [&] {
    v1::Op op;
    fuzz.FillKind(&op, fuzz.Draw(2) != 0 ? "" : fuzz.Draw(2) == 0 ? "arrive" : "join");
    const int kind =
        op.has_arrive_many() ? static_cast<int>(v1::OpResult::kArrive) : op.kind_case();
    const int call = calls++;
    waiting.insert(call);
    const uint64_t op_id = core.Submit(std::move(op), [&, call, kind](const v1::OpResult& result) {
      EXPECT_EQ(++answered[call], 1) << "call " << call << " was answered twice";
      waiting.erase(call);
      if (!result.has_error() && result.kind_case() != kind) ++results_of_wrong_kind;
      if (fuzz.Draw(20) == 0) submit();  // from within an answer
    });
    if (op_id != 0 && fuzz.Draw(4) == 0) forgettable.emplace_back(call, op_id);
  };
  const auto newest_stream = [&]() -> FakeOutgoingStream* {
    return transport.streams.empty() || transport.streams.back()->closed
               ? nullptr
               : transport.streams.back().get();
  };
  const auto welcome = [&](FakeOutgoingStream* to, uint64_t term) {
    v1::CoordinatorFrame frame;
    v1::Welcome& hello = *frame.mutable_welcome();
    hello.set_protocol(1);
    hello.set_term(term);
    hello.set_session_id(fuzz.session);
    hello.set_last_received_seq(fuzz.sent_seq);
    hello.set_cluster_id("c");
    to->events->OnFrame(frame);
  };

  client->Tick();
  // Some have never been connected when things begin to go wrong, and may be refused for good.
  const bool welcomed = GetParam() % 6 != 0;
  if (welcomed) welcome(newest_stream(), 0);
  for (int i = 0; i < 6000; ++i) {
    FakeOutgoingStream* const to = newest_stream();
    if (to == nullptr || to->closing) {  // open a stream soon, or little is tried
      clock.Advance(absl::Milliseconds(100));
      client->Tick();
    }
    switch (fuzz.Draw(16)) {
      case 0:
        clock.Advance(absl::Milliseconds(fuzz.Draw(fuzz.Draw(4) == 0 ? 30'000 : 400)));
        client->Tick();
        core.Tick();
        break;
      case 1:
      case 2:
      case 3:
      case 4:
        submit();
        break;
      case 5:
        if (!forgettable.empty()) {
          const auto [call, op_id] = forgettable.back();
          forgettable.pop_back();
          if (waiting.count(call) == 0) break;
          core.Forget(op_id);
          waiting.erase(call);
          answered[call] = 1;  // and never a second time
        }
        break;
      case 6: {
        v1::StackReply stack;
        fuzz.Fill(&stack);
        client->SendStack(std::move(stack));
        break;
      }
      case 7:
        if (to != nullptr && fuzz.Draw(6) == 0) {
          to->closed = true;
          to->events->OnClosed(
              fuzz.Draw(4) == 0
                  ? absl::OkStatus()
                  : absl::Status(static_cast<absl::StatusCode>(fuzz.Draw(17)), "it broke"));
          if (fuzz.Draw(2) == 0) {
            fuzz.session = absl::StrCat("s", fuzz.Draw(1000));
          }
        }
        break;
      case 8:
        if (to != nullptr && !client->connected()) welcome(to, client->term());
        break;
      case 9:
      case 10:
        if (to != nullptr && to->writing) {
          to->writing = false;
          const v1::AgentFrame& frame = to->written.back();
          if (frame.seq() != 0) fuzz.sent_seq = frame.seq();
          if (frame.has_hello()) {
            const bool resumes = frame.hello().session_id() == fuzz.session;
            fuzz.next_seq = resumes ? frame.hello().last_received_seq() + 1 : 1;
            if (!resumes) fuzz.sent_seq = 0;
          }
          for (const v1::Op& op : frame.ops().ops()) {
            EXPECT_NE(op.kind_case(), v1::Op::KIND_NOT_SET);
            fuzz.ops.push_back(op.op_id());
          }
          const bool bye = frame.has_bye();
          to->events->OnWritten();
          if (bye && fuzz.Draw(3) != 0) {
            to->closed = true;
            to->events->OnClosed(absl::OkStatus());
          }
        }
        break;
      case 11:
        // Includes streams that were given up.
        if (transport.streams.size() > 1) {
          FakeOutgoingStream& old = *transport.streams[fuzz.Draw(transport.streams.size() - 1)];
          v1::CoordinatorFrame frame;
          fuzz.FillKind(&frame);
          if (frame.has_goodbye()) frame.mutable_goodbye()->clear_final();
          if (!old.closed) old.events->OnFrame(frame);
        }
        break;
      case 12:
        if (to != nullptr && client->connected() && fuzz.Draw(4) == 0) {
          v1::CoordinatorFrame frame;
          frame.set_seq(fuzz.next_seq++);
          v1::UseHub& use = *frame.mutable_directive()->mutable_use_hub();
          use.set_node(absl::StrCat("hub", fuzz.Draw(3)));
          use.set_address(absl::StrCat("10.0.0.", 2 + fuzz.Draw(3), ":1"));
          to->events->OnFrame(frame);
        }
        break;
      default:
        if (to != nullptr) {
          v1::CoordinatorFrame frame;
          fuzz.FillKind(&frame, fuzz.Draw(2) == 0 ? "" : "results");
          frame.set_seq(fuzz.Draw(60) == 0 ? fuzz.Draw(fuzz.next_seq + 3) : fuzz.next_seq++);
          frame.set_ack(fuzz.Draw(10) == 0 ? fuzz.Draw(UINT64_MAX) : fuzz.sent_seq);
          if (fuzz.Draw(8) == 0) {
            // Like a newer coordinator's, with unknown fields.
            v1::CoordinatorFrame mutated;
            if (mutated.ParseFromString(Mutate(frame.SerializeAsString(), fuzz.generator()))) {
              frame = std::move(mutated);
            }
          }
          // An end for good has separate tests: nothing would follow it.
          if (frame.has_goodbye()) frame.mutable_goodbye()->clear_final();
          to->events->OnFrame(frame);
        }
    }
    ASSERT_LE(client->held_ops(), 200u + 2 * 1024);
  }
  EXPECT_EQ(results_of_wrong_kind, 0);
  if (welcomed) {
    EXPECT_GT(connected, 3);
    EXPECT_GT(directives, 3);
    EXPECT_GT(transport.streams.size(), 3u);
    std::set<std::string> hubs;
    for (const std::shared_ptr<FakeOutgoingStream>& opened : transport.streams)
      hubs.insert(opened->hub);
    EXPECT_GE(hubs.size(), 2u);
    EXPECT_EQ(hubs.count("10.0.0.9:1"), 0u);
  }

  // The coordinator ends permanently: all pending operations fail with that.
  for (int i = 0; i < 100 && !client->connected(); ++i) {
    clock.Advance(absl::Minutes(1));
    client->Tick();
    if (FakeOutgoingStream* const to = newest_stream()) welcome(to, client->term());
  }
  if (FakeOutgoingStream* const to = newest_stream()) {
    to->closed = true;
    to->events->OnClosed(absl::UnavailableError("gone"));
  }
  for (int i = 0; i < 4; ++i) {  // a move to a hub is no outage as long as the hub answers
    clock.Advance(absl::Hours(1));
    core.Tick();
    client->Tick();
  }
  EXPECT_EQ(client->held_ops(), 0u);
  EXPECT_TRUE(waiting.empty()) << waiting.size() << " calls wait for ever";
  client.reset();
}

INSTANTIATE_TEST_SUITE_P(Seeds, StreamFuzzTest, ::testing::Range(uint64_t{1}, uint64_t{25}));

}  // namespace
}  // namespace muster::agent
