// Feeds the hub with anything that hostile, broken or newer agents may send, and that any
// coordinator may answer, and checks rules that must hold anyway.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/fake_incoming_stream.h"
#include "agent/fake_op_sender.h"
#include "agent/hub_core.h"
#include "base/fake_clock.h"
#include "base/mutate.h"
#include "proto/random_message.h"

namespace muster::agent {
namespace {

class Fuzzer final : public RandomMessage {
 public:
  using RandomMessage::RandomMessage;

 private:
  std::string Text(const std::string& name) override {
    if (name == "job_id") return Draw(3) == 0 ? "k" : "j";
    if (name == "worker_id") return absl::StrCat("w", Draw(4));
    if (name == "barrier_id") return Draw(2) == 0 ? "b" : "c";
    if (name == "node") return absl::StrCat("n", Draw(6));
    return RandomMessage::Text(name);
  }
  int64_t Number(const std::string& name) override {
    if (Draw(40) == 0) return RandomMessage::Number(name);
    if (name == "generation" || name == "counter") return static_cast<int64_t>(Draw(3));
    if (name == "rank" || name == "ranks") return static_cast<int64_t>(Draw(8));
    if (name == "incarnation" || name == "incarnations") return static_cast<int64_t>(Draw(3));
    if (name == "protocol_min" || name == "protocol_max") return Draw(20) == 0 ? 2 : 1;
    if (name == "reason") return static_cast<int64_t>(Draw(30));
    return RandomMessage::Number(name);
  }
};

// An agent's stream with what the agent knows about it.
struct Stream {
  std::shared_ptr<FakeIncomingStream> incoming;
  uint64_t seq = 0;  // the last one sent
  uint64_t received = 0;
  bool closed = false;
};

class HubFuzzTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(HubFuzzTest, AnyFrames_LimitsHoldAndOwnCallsEndOnce) {
  Fuzzer fuzz(GetParam());
  FakeClock clock;
  FakeOpSender upstream;
  Upstream state;
  state.connected = true;
  state.session = 1;
  state.lease = absl::Seconds(6);

  HubCore::Options options;
  options.node = "hub";
  options.incarnation = 9;
  options.clock = &clock;
  options.upstream = [&] { return state; };
  options.send_stack = [](v1::StackReply) {};
  options.limits.agents = 4;
  options.limits.calls_of_agent = 40;
  options.limits.calls = 100;
  options.limits.unsent_bytes = 20'000;
  options.limits.unacknowledged_bytes = 60'000;
  options.limits.beat_bytes_of_agent = 4000;
  options.limits.workers_of_agent = 3;
  options.limits.jobs_of_agent = 2;
  options.limits.ranks_of_agent = 5;
  HubCore core(options, &upstream);

  std::vector<Stream> streams;
  std::map<int, int> answered;  // the answered calls of this node
  int own = 0, results = 0, directives = 0, goodbyes = 0;

  const auto take = [&](Stream& stream) {
    if (stream.closed || !stream.incoming->in_flight.has_value()) return;
    const v1::CoordinatorFrame frame = *std::exchange(stream.incoming->in_flight, std::nullopt);
    stream.received = std::max(stream.received, frame.seq());
    results += frame.results().results_size();
    directives += frame.has_directive();
    goodbyes += frame.has_goodbye();
    core.OnWritten(stream.incoming);
  };
  const auto close = [&](Stream& stream) {
    if (std::exchange(stream.closed, true)) return;
    core.OnClosed(stream.incoming);
  };

  for (int i = 0; i < 8000; ++i) {
    Stream* const stream = streams.empty() ? nullptr : &streams[fuzz.Draw(streams.size())];
    switch (fuzz.Draw(16)) {
      case 0:
        clock.Advance(absl::Milliseconds(fuzz.Draw(fuzz.Draw(6) == 0 ? 80'000 : 10)));
        core.Tick();
        break;
      case 1: {
        v1::AgentFrame frame;
        fuzz.FillKind(&frame, fuzz.Draw(10) == 0 ? "" : "hello");
        if (frame.has_hello() && fuzz.Draw(4) != 0) {
          frame.mutable_hello()->set_agent_incarnation(1);
          frame.mutable_hello()->set_protocol_min(1);
          frame.mutable_hello()->set_protocol_max(1);
        }
        Stream fresh{.incoming = std::make_shared<FakeIncomingStream>()};
        fresh.incoming->reading = false;
        core.OnFrame(fresh.incoming, frame, 0);
        while (fresh.incoming->in_flight.has_value()) {
          if (fresh.incoming->in_flight->has_welcome())
            fresh.seq = fresh.incoming->in_flight->welcome().last_received_seq();
          take(fresh);
        }
        streams.push_back(std::move(fresh));
        if (streams.size() > 12) {
          close(streams.front());
          streams.erase(streams.begin());
        }
        break;
      }
      case 2:
        if (stream != nullptr && fuzz.Draw(4) == 0) close(*stream);
        break;
      case 3:
      case 4:
      case 5:
        if (stream != nullptr) take(*stream);
        break;
      case 6: {
        v1::Directive directive;
        fuzz.FillKind(&directive);
        core.OnDirective(directive);
        break;
      }
      case 7: {
        v1::Op op;
        fuzz.FillKind(&op, fuzz.Draw(2) == 0 ? "arrive" : "");
        const int call = own++;
        core.Submit(std::move(op), [&, call](const v1::OpResult&) {
          EXPECT_EQ(++answered[call], 1) << "call " << call << " was answered twice";
        });
        break;
      }
      case 8:
      case 9:
      case 10: {
        v1::OpResult result;
        fuzz.FillKind(&result);
        if (fuzz.Draw(3) == 0) fuzz.Fill(result.mutable_error());
        upstream.Answer(std::move(result));
        break;
      }
      case 11:
        if (fuzz.Draw(10) == 0) {
          if (fuzz.Draw(2) == 0) {
            state.connected = !state.connected;
          } else {
            ++state.session;
          }
          core.OnUpstream();
        }
        break;
      case 12: {
        v1::Beat beat;
        core.AddToBeat(&beat);
        EXPECT_LE(beat.hub().agents_size(), 4);
        EXPECT_LE(beat.ByteSizeLong(), 4 * 5000u + 4 * 600u);
        break;
      }
      default:
        if (stream != nullptr && !stream->closed && stream->incoming->reading) {
          stream->incoming->reading = false;
          v1::AgentFrame frame;
          fuzz.FillKind(&frame, fuzz.Draw(3) == 0 ? "" : fuzz.Draw(4) == 0 ? "beat" : "ops");
          if (frame.has_ops() && fuzz.Draw(2) == 0) {
            v1::Op& op = *frame.mutable_ops()->add_ops();
            fuzz.FillKind(&op, fuzz.Draw(2) == 0 ? "arrive" : "arrive_many");
          }
          const bool numbered = frame.has_ops() || frame.has_stack();
          frame.set_seq(fuzz.Draw(60) == 0 ? fuzz.Draw(20) : numbered ? ++stream->seq : 0);
          frame.set_ack(fuzz.Draw(10) == 0 ? fuzz.Draw(UINT64_MAX) : stream->received);
          if (fuzz.Draw(8) == 0) {
            v1::AgentFrame mutated;
            if (mutated.ParseFromString(Mutate(frame.SerializeAsString(), fuzz.generator())))
              frame = std::move(mutated);
          }
          core.OnFrame(stream->incoming, frame, frame.ByteSizeLong());
        }
    }
    ASSERT_LE(core.agents(), 4u);
    // The agents' operations are at most as many as may be held; otherwise the joint ones of ended
    // sessions would pile up.
    ASSERT_LE(upstream.ops().size(), 100u + static_cast<size_t>(own));
  }
  EXPECT_GT(results, 5);
  EXPECT_GT(directives, 0);
  EXPECT_GT(goodbyes, 0);

  // The hub ends: nothing of the agents is left, and this node's own calls are answered.
  core.Finish();
  for (Stream& stream : streams) {
    while (!stream.closed && stream.incoming->in_flight.has_value()) take(stream);
  }
  clock.Advance(absl::Minutes(2));
  core.Tick();
  for (Stream& stream : streams) {
    if (stream.incoming->status.has_value()) close(stream);
    EXPECT_TRUE(stream.closed) << "a stream that nobody ended";
  }
  EXPECT_EQ(core.agents(), 0u);
  for (int i = 0; i < 2 * own + 200 && !upstream.ops().empty(); ++i) {
    v1::OpResult result;
    result.mutable_error()->set_code(13);
    upstream.Answer(std::move(result));
  }
  EXPECT_TRUE(upstream.ops().empty());
  EXPECT_EQ(answered.size(), static_cast<size_t>(own));
}

INSTANTIATE_TEST_SUITE_P(Seeds, HubFuzzTest, ::testing::Range(uint64_t{1}, uint64_t{25}));

}  // namespace
}  // namespace muster::agent
