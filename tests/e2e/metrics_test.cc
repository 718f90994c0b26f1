// The metrics page and the structured log of a real coordinator, read as strictly as any reader
// may.
#include <grpcpp/client_context.h>
#include <httplib.h>

#include <cmath>
#include <map>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/checkpoint.grpc.pb.h"
#include "proto/muster/v1/kv.grpc.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

// One page of the text format, version 0.0.4.
struct Page {
  std::map<std::string, std::string> types;  // by family
  std::map<std::string, double> samples;     // "name{a=\"b\"}" -> value, labels as written

  double Sum(const std::string& prefix) const {
    double sum = 0;
    for (const auto& [name, value] : samples) {
      if (absl::StartsWith(name, prefix)) sum += value;
    }
    return sum;
  }
};

bool IsName(absl::string_view name, bool colon) {
  if (name.empty() || absl::ascii_isdigit(name[0])) return false;
  for (const char c : name) {
    if (!absl::ascii_isalnum(c) && c != '_' && !(colon && c == ':')) return false;
  }
  return true;
}

// Takes {a="b",...} off the front of `rest`. Returns false if it is not well formed.
bool TakeLabels(absl::string_view* rest, std::map<std::string, std::string>* labels) {
  if (!absl::ConsumePrefix(rest, "{")) return true;
  while (true) {
    const size_t equals = rest->find('=');
    if (equals == absl::string_view::npos) return false;
    const std::string name(rest->substr(0, equals));
    if (!IsName(name, false)) return false;
    rest->remove_prefix(equals + 1);
    if (!absl::ConsumePrefix(rest, "\"")) return false;
    std::string value;
    while (!rest->empty() && rest->front() != '"') {
      char c = rest->front();
      rest->remove_prefix(1);
      if (c == '\\') {
        if (rest->empty()) return false;
        const char escaped = rest->front();
        rest->remove_prefix(1);
        if (escaped != '\\' && escaped != '"' && escaped != 'n') return false;
        c = escaped == 'n' ? '\n' : escaped;
      }
      value += c;
    }
    if (!absl::ConsumePrefix(rest, "\"") || !labels->emplace(name, value).second) return false;
    if (absl::ConsumePrefix(rest, "}")) return true;
    if (!absl::ConsumePrefix(rest, ",")) return false;
  }
}

bool ParseValue(absl::string_view text, double* value) {
  if (text == "+Inf" || text == "-Inf" || text == "NaN") {
    *value = text == "+Inf" ? HUGE_VAL : text == "-Inf" ? -HUGE_VAL : NAN;
    return true;
  }
  return absl::SimpleAtod(text, value);
}

// Fails the test for what the format or good practice forbids: a family without HELP and TYPE or in
// two places, a sample twice, a counter that does not end in _total, a histogram whose buckets
// fall, or that lacks +Inf, _sum or _count, or whose +Inf is not its _count.
Page Parse(const std::string& text) {
  Page page;
  EXPECT_TRUE(absl::EndsWith(text, "\n"));
  std::set<std::string> families;
  std::string family, help_of;
  struct Series {
    std::vector<std::pair<double, double>> buckets;
    bool has_sum = false, has_count = false;
    double count = 0;
  };
  std::map<std::string, Series> histogram;  // of the family, by the other labels
  const auto end_family = [&] {
    for (const auto& [labels, series] : histogram) {
      const std::string where = absl::StrCat(family, " ", labels);
      EXPECT_TRUE(series.has_sum && series.has_count) << where;
      if (series.buckets.empty()) {
        ADD_FAILURE() << where << " has no buckets";
        continue;
      }
      for (size_t i = 1; i < series.buckets.size(); ++i) {
        EXPECT_LT(series.buckets[i - 1].first, series.buckets[i].first) << where;
        EXPECT_LE(series.buckets[i - 1].second, series.buckets[i].second) << where;
      }
      EXPECT_EQ(series.buckets.back().first, HUGE_VAL) << where;
      EXPECT_EQ(series.buckets.back().second, series.count) << where;
    }
    histogram.clear();
  };
  for (const absl::string_view line : absl::StrSplit(text.substr(0, text.size() - 1), '\n')) {
    if (line.empty()) {
      ADD_FAILURE() << "an empty line";
      continue;
    }
    absl::string_view rest = line;
    if (absl::ConsumePrefix(&rest, "# HELP ")) {
      end_family();
      const std::pair<std::string, std::string> parts =
          absl::StrSplit(rest, absl::MaxSplits(' ', 1));
      EXPECT_TRUE(IsName(parts.first, true)) << line;
      EXPECT_GT(parts.second.size(), 4u) << line;
      EXPECT_TRUE(families.insert(parts.first).second) << "twice: " << line;
      help_of = parts.first;
      continue;
    }
    if (absl::ConsumePrefix(&rest, "# TYPE ")) {
      const std::pair<std::string, std::string> parts = absl::StrSplit(rest, ' ');
      EXPECT_EQ(parts.first, help_of) << line;
      family = parts.first;
      page.types[family] = parts.second;
      EXPECT_THAT((std::set<std::string>{"counter", "gauge", "histogram"}), Contains(parts.second));
      EXPECT_EQ(parts.second == "counter", absl::EndsWith(family, "_total")) << line;
      continue;
    }
    const size_t name_end = rest.find_first_of("{ ");
    if (name_end == absl::string_view::npos) {
      ADD_FAILURE() << line;
      continue;
    }
    const std::string name(rest.substr(0, name_end));
    rest.remove_prefix(name_end);
    std::map<std::string, std::string> labels;
    double value = 0;
    if (!TakeLabels(&rest, &labels) || !absl::ConsumePrefix(&rest, " ") ||
        !ParseValue(rest, &value)) {
      ADD_FAILURE() << "not a sample: " << line;
      continue;
    }
    EXPECT_TRUE(page.samples.emplace(std::string(line.substr(0, line.rfind(' '))), value).second)
        << "twice: " << line;
    if (page.types[family] != "histogram") {
      EXPECT_EQ(name, family) << line;
      EXPECT_GE(value, 0) << line;
      continue;
    }
    double bound = 0;
    if (const auto le = labels.find("le"); le != labels.end()) {
      EXPECT_TRUE(ParseValue(le->second, &bound)) << line;
      labels.erase(le);
    }
    Series& series = histogram[absl::StrJoin(labels, ",", absl::PairFormatter("="))];
    if (name == family + "_bucket") {
      series.buckets.emplace_back(bound, value);
    } else if (name == family + "_sum") {
      series.has_sum = true;
      EXPECT_GE(value, 0) << line;
    } else if (name == family + "_count") {
      series.has_count = true;
      series.count = value;
    } else {
      ADD_FAILURE() << "in family " << family << ": " << line;
    }
  }
  end_family();
  return page;
}

class MetricsTest : public ClusterFixture {
 protected:
  void SetUp() override {
    ClusterFixture::SetUp();
    coordinator_ = StartCoordinator(
        {"--metrics_listen", "127.0.0.1:0", "--log_format", "json", "--log_level", "info"});
    channel_ = *rpc::Connect(address_);
    // "metrics on port N", as JSON.
    std::string port;
    while (port.empty()) {
      for (const std::string& line : coordinator_->err()) {
        const nlohmann::json entry = nlohmann::json::parse(line);
        const std::string message = entry["message"];
        if (absl::StartsWith(message, "metrics on port ")) port = message.substr(16);
      }
    }
    ASSERT_TRUE(absl::SimpleAtoi(port, &port_));
  }
  Page Scrape() {
    const auto response = httplib::Client("127.0.0.1", port_).Get("/metrics");
    EXPECT_TRUE(response && response->status == 200);
    if (!response) return {};
    EXPECT_EQ(response->get_header_value("Content-Type"),
              "text/plain; version=0.0.4; charset=utf-8");
    return Parse(response->body);
  }
  v1::Fence Fence(int worker) const {
    v1::Fence fence;
    fence.set_job_id(kJob);
    fence.set_worker_id(absl::StrCat("w", worker));
    fence.set_incarnation(10 + worker);
    fence.set_generation(generation_);
    return fence;
  }
  // Begins a call of two workers and waits for both.
  template <typename Stub, typename Request, typename Reply>
  void Both(Stub& stub,
            void (Stub::async::*method)(grpc::ClientContext*, const Request*, Reply*,
                                        std::function<void(grpc::Status)>),
            std::vector<Request> requests, std::vector<Reply>* replies) {
    replies->resize(requests.size());
    std::vector<grpc::ClientContext> contexts(requests.size());
    std::vector<Notification> done(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) {
      rpc::SetTimeout(contexts[i], absl::Minutes(2));
      (stub.async()->*method)(&contexts[i], &requests[i], &(*replies)[i],
                              [&done, i](const grpc::Status& status) {
                                EXPECT_TRUE(status.ok()) << status.error_message();
                                done[i].Notify();
                              });
    }
    for (Notification& one : done) one.WaitForNotification();
  }

  // Publishes, as rank 0 alone, a checkpoint of 100 bytes that took 12 s, of which training waited
  // 250 ms.
  void PublishCheckpoint() {
    const auto stub = v1::Checkpoints::NewStub(channel_);
    const auto call = [&](auto method, auto request, auto* reply) {
      *request.mutable_fence() = Fence(0);
      grpc::ClientContext context;
      rpc::SetTimeout(context, absl::Minutes(2));
      const grpc::Status status = (stub.get()->*method)(&context, request, reply);
      ASSERT_TRUE(status.ok()) << status.error_message();
    };
    v1::BeginCheckpointRequest begin;
    begin.set_path("/c/1");
    begin.set_staging("/c/1.tmp");
    begin.set_ranks(1);
    v1::BeginCheckpointReply begun;
    call(&v1::Checkpoints::Stub::Begin, begin, &begun);
    v1::ReportShardsRequest report;
    report.set_checkpoint_id(begun.checkpoint_id());
    report.set_last(true);
    v1::ShardFile* const file = report.add_files();
    file->set_name("model.safetensors");
    file->set_bytes(100);
    file->set_xxh3(std::string(32, 'a'));
    v1::ReportShardsReply reported;
    call(&v1::Checkpoints::Stub::ReportShards, report, &reported);
    v1::SealCheckpointRequest seal;
    seal.set_checkpoint_id(begun.checkpoint_id());
    v1::SealCheckpointReply sealed;
    call(&v1::Checkpoints::Stub::Seal, seal, &sealed);
    v1::PublishCheckpointRequest publish;
    publish.set_checkpoint_id(begun.checkpoint_id());
    publish.set_stall_us(250'000);
    publish.set_save_us(12'000'000);
    v1::PublishCheckpointReply published;
    call(&v1::Checkpoints::Stub::Publish, publish, &published);
  }

  // A name with characters on which a log line and a label value must not break.
  const std::string kJob = "two\nlines \"quoted\" \\ \xc3\xa9";
  std::unique_ptr<Command> coordinator_;
  std::shared_ptr<grpc::Channel> channel_;
  int port_ = 0;
  uint64_t generation_ = 0;
};

TEST_F(MetricsTest, Page_IsWellFormedAndMovesWithWhatHappens) {
  const Page before = Scrape();
  for (const char* family : {"grpc_server_handling_seconds", "muster_barrier_wait_seconds",
                             "muster_journal_fsync_seconds"}) {
    ASSERT_EQ(before.types.count(family), 1u) << family;
    EXPECT_EQ(before.types.at(family), "histogram") << family;
  }
  EXPECT_EQ(before.samples.at("muster_members{state=\"running\"}"), 0);

  auto rendezvous = v1::Rendezvous::NewStub(channel_);
  std::vector<v1::JoinRequest> joins(2);
  for (int i = 0; i < 2; ++i) {
    *joins[i].mutable_fence() = Fence(i);
    joins[i].mutable_spec()->set_min_workers(2);
    joins[i].mutable_spec()->set_max_workers(2);
    joins[i].mutable_spec()->mutable_lease()->set_seconds(600);
    joins[i].set_preferred_rank(i);
  }
  std::vector<v1::JoinReply> seats;
  Both(*rendezvous, &v1::Rendezvous::Stub::async::Join, joins, &seats);
  generation_ = seats[0].generation();
  auto barriers = v1::Barrier::NewStub(channel_);
  std::vector<v1::ArriveRequest> arrivals(2);
  for (int i = 0; i < 2; ++i) {
    *arrivals[i].mutable_fence() = Fence(i);
    arrivals[i].set_barrier_id("b");
    arrivals[i].set_rank(i);
  }
  std::vector<v1::ArriveReply> passed;
  Both(*barriers, &v1::Barrier::Stub::async::Arrive, arrivals, &passed);
  PublishCheckpoint();
  {
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Minutes(2));
    v1::TxnRequest request;
    *request.mutable_fence() = Fence(0);
    request.add_then()->mutable_put()->set_key("k");
    request.mutable_then(0)->mutable_put()->set_klass(v1::KV_CLASS_DURABLE);
    v1::TxnReply reply;
    ASSERT_TRUE(v1::KeyValueStore::NewStub(channel_)->Txn(&context, request, &reply).ok());
  }
  const Page seated = Scrape();
  EXPECT_EQ(seated.samples.at("muster_members{state=\"running\"}"), 2);
  EXPECT_EQ(seated.samples.at("muster_generation_changes_total{change=\"sealed\"}"), 1);
  EXPECT_EQ(seated.samples.at("muster_barrier_wait_seconds_count"), 1);
  EXPECT_EQ(seated.samples.at("muster_barriers_total{result=\"passed\"}"), 1);
  EXPECT_EQ(seated.samples.at("muster_checkpoints_total{result=\"published\"}"), 1);
  EXPECT_EQ(seated.samples.at("muster_checkpoint_written_bytes_total"), 100);
  EXPECT_EQ(seated.samples.at("muster_checkpoint_stall_seconds_sum"), 0.25);
  EXPECT_EQ(seated.samples.at("muster_checkpoint_save_seconds_sum"), 12);
  EXPECT_EQ(seated.samples.at("muster_checkpoint_save_seconds_bucket{le=\"6.5536\"}"), 0);
  EXPECT_EQ(seated.samples.at("muster_checkpoint_save_seconds_bucket{le=\"13.1072\"}"), 1);
  EXPECT_GT(seated.samples.at("muster_journal_fsync_seconds_count"),
            before.samples.at("muster_journal_fsync_seconds_count"));
  EXPECT_GT(seated.samples.at("muster_journal_fsync_seconds_sum"), 0);
  const std::string arrive =
      "grpc_type=\"unary\",grpc_service=\"muster.v1.Barrier\",grpc_method=\"Arrive\"";
  EXPECT_EQ(seated.samples.at(absl::StrCat("grpc_server_handling_seconds_count{", arrive, "}")), 2);
  EXPECT_GT(seated.samples.at(absl::StrCat("grpc_server_handling_seconds_sum{", arrive, "}")), 0);
  EXPECT_EQ(
      seated.samples.at(absl::StrCat("grpc_server_handled_total{", arrive, ",grpc_code=\"OK\"}")),
      2);

  {
    grpc::ClientContext context;
    rpc::SetTimeout(context, absl::Minutes(2));
    v1::EndGenerationRequest request;
    *request.mutable_fence() = Fence(0);
    request.set_reason("a \"reason\"\nof two lines, and a byte \x01");
    v1::EndGenerationReply reply;
    ASSERT_TRUE(rendezvous->EndGeneration(&context, request, &reply).ok());
  }
  const Page ended = Scrape();
  EXPECT_EQ(ended.samples.at("muster_generation_changes_total{change=\"ended\"}"), 1);
  for (const auto& [name, value] : seated.samples) {
    const std::string family = name.substr(0, name.find('{'));
    const auto type = seated.types.find(family);
    if (type == seated.types.end() || type->second != "counter") continue;
    EXPECT_GE(ended.samples.at(name), value) << name << " went back";
  }

  // The log: one object a line, whatever the names hold; a reason is one line in text too.
  coordinator_->Signal(SIGTERM);
  EXPECT_EQ(coordinator_->Wait(), 0);
  bool told = false;
  for (const std::string& line : coordinator_->err()) {
    const nlohmann::json entry = nlohmann::json::parse(line, nullptr, false);
    ASSERT_TRUE(entry.is_object()) << line;
    for (const char* key : {"time", "level", "who", "file", "message"}) {
      EXPECT_TRUE(entry.contains(key) && entry[key].is_string()) << key << " in " << line;
    }
    EXPECT_TRUE(entry["line"].is_number_integer()) << line;
    told = told || absl::StrContains(entry["message"].get<std::string>(),
                                     "a \"reason\"\\nof two lines, and a byte \\x01");
  }
  EXPECT_TRUE(told) << coordinator_->err_text();
}

}  // namespace
}  // namespace muster
