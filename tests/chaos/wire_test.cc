// An old program and a new one: what protocol 1 first wrote must keep its meaning, and an agent of
// another version is accepted, or refused with a message.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>
#include <grpcpp/client_context.h>

#include <algorithm>
#include <csignal>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/admin.pb.h"
#include "proto/muster/v1/backup.pb.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/journal.pb.h"
#include "proto/muster/v1/operations.pb.h"
#include "proto/muster/v1/rendezvous.grpc.pb.h"
#include "proto/muster/v1/session.grpc.pb.h"
#include "proto/muster/v1/watch.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"
#include "tests/chaos/child.h"

namespace muster::chaos {
namespace {

using ::google::protobuf::Descriptor;
using ::google::protobuf::FieldDescriptor;
using ::google::protobuf::FileDescriptor;
using ::google::protobuf::Message;
using ::google::protobuf::MessageFactory;
using ::google::protobuf::Reflection;
using ::testing::HasSubstr;

// Returns the files of the messages that travel, and of those that lie on disk.
std::vector<const FileDescriptor*> Files() {
  std::vector<const FileDescriptor*> files = {
      v1::AgentFrame::descriptor()->file(),      v1::JournalRecord::descriptor()->file(),
      v1::StatusReply::descriptor()->file(),     v1::WatchBatch::descriptor()->file(),
      v1::ReadBackupReply::descriptor()->file(), v1::SetLogLevelReply::descriptor()->file()};
  for (size_t i = 0; i < files.size(); ++i) {
    for (int d = 0; d < files[i]->dependency_count(); ++d) {
      const FileDescriptor* const file = files[i]->dependency(d);
      if (file->package() == "muster.v1" &&
          std::find(files.begin(), files.end(), file) == files.end()) {
        files.push_back(file);
      }
    }
  }
  return files;
}

std::unique_ptr<Message> New(const Descriptor* type) {
  return std::unique_ptr<Message>(MessageFactory::generated_factory()->GetPrototype(type)->New());
}

// Returns a message with only this field set, to a value that depends on nothing.
std::unique_ptr<Message> WithOnly(const FieldDescriptor* field) {
  std::unique_ptr<Message> message = New(field->containing_type());
  const Reflection* const r = message->GetReflection();
  const bool many = field->is_repeated();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      many ? r->AddString(message.get(), field, "text")
           : r->SetString(message.get(), field, "text");
      break;
    case FieldDescriptor::CPPTYPE_INT32:
      many ? r->AddInt32(message.get(), field, -7) : r->SetInt32(message.get(), field, -7);
      break;
    case FieldDescriptor::CPPTYPE_INT64:
      many ? r->AddInt64(message.get(), field, -8) : r->SetInt64(message.get(), field, -8);
      break;
    case FieldDescriptor::CPPTYPE_UINT32:
      many ? r->AddUInt32(message.get(), field, 9) : r->SetUInt32(message.get(), field, 9);
      break;
    case FieldDescriptor::CPPTYPE_UINT64:
      many ? r->AddUInt64(message.get(), field, 300) : r->SetUInt64(message.get(), field, 300);
      break;
    case FieldDescriptor::CPPTYPE_BOOL:
      many ? r->AddBool(message.get(), field, true) : r->SetBool(message.get(), field, true);
      break;
    case FieldDescriptor::CPPTYPE_DOUBLE:
      many ? r->AddDouble(message.get(), field, 0.5) : r->SetDouble(message.get(), field, 0.5);
      break;
    case FieldDescriptor::CPPTYPE_FLOAT:
      many ? r->AddFloat(message.get(), field, 0.5f) : r->SetFloat(message.get(), field, 0.5f);
      break;
    case FieldDescriptor::CPPTYPE_ENUM:
      many ? r->AddEnumValue(message.get(), field, 1) : r->SetEnumValue(message.get(), field, 1);
      break;
    case FieldDescriptor::CPPTYPE_MESSAGE:
      many ? r->AddMessage(message.get(), field) : r->MutableMessage(message.get(), field);
      break;
  }
  return message;
}

std::string FieldLine(const FieldDescriptor* field) {
  return absl::StrCat(field->full_name(), " ",
                      absl::BytesToHexString(WithOnly(field)->SerializeAsString()));
}

// Lines "muster.v1.MESSAGE.FIELD BYTES": the bytes of a message with only this field set. A line
// that fails means that programs in the field, or a journal on disk, would be misread.
TEST(Wire, RecordedFields_MeanWhatTheyMeant) {
  const auto recorded = ReadFile(ProgramPath("tests/chaos/wire_v1.txt"));
  ASSERT_TRUE(recorded.ok()) << recorded.status();
  int lines = 0;
  for (const absl::string_view line : absl::StrSplit(*recorded, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    ASSERT_EQ(words.size(), 2u) << line;
    const FieldDescriptor* const field =
        google::protobuf::DescriptorPool::generated_pool()->FindFieldByName(words[0]);
    if (field == nullptr) {
      ADD_FAILURE() << words[0] << " is gone: an old program still sends it";
      continue;
    }
    std::unique_ptr<Message> message = New(field->containing_type());
    ASSERT_TRUE(message->ParseFromString(absl::HexStringToBytes(words[1]))) << line;
    std::vector<const FieldDescriptor*> set;
    message->GetReflection()->ListFields(*message, &set);
    EXPECT_TRUE(set.size() == 1 && set[0] == field) << line << ": " << message->ShortDebugString();
    EXPECT_EQ(FieldLine(field), line);
    ++lines;
  }
  EXPECT_GT(lines, 300);
}

// Prints what to append to the file when a field is new.
TEST(Wire, EveryField_IsRecorded) {
  const auto recorded = ReadFile(ProgramPath("tests/chaos/wire_v1.txt"));
  ASSERT_TRUE(recorded.ok()) << recorded.status();
  std::vector<std::string> missing;
  for (const FileDescriptor* file : Files()) {
    for (int m = 0; m < file->message_type_count(); ++m) {
      const Descriptor* const type = file->message_type(m);
      for (int f = 0; f < type->field_count(); ++f) {
        const std::string line = FieldLine(type->field(f));
        if (!absl::StrContains(*recorded, absl::StrCat(type->field(f)->full_name(), " "))) {
          missing.push_back(line);
        }
      }
    }
  }
  EXPECT_TRUE(missing.empty()) << "append to tests/chaos/wire_v1.txt:\n"
                               << absl::StrJoin(missing, "\n");
}

class OtherAgents : public ::testing::Test {
 protected:
  void SetUp() override {
    host_ = *agent::ProcessHost::Start();
    coordinator_ = std::make_unique<Child>(
        *host_,
        std::vector<std::string>{ProgramPath("coordinator/cmd/muster-coordinator"), "--listen",
                                 "127.0.0.1:0", "--insecure"},
        std::map<std::string, std::string>{}, [] {});
    ASSERT_TRUE(coordinator_->WaitFor("127.0.0.1:", absl::Seconds(20))) << coordinator_->text();
  }
  void TearDown() override {
    coordinator_->Signal(SIGTERM);
    EXPECT_EQ(coordinator_->Wait(), 0) << coordinator_->text();
    host_.reset();
  }

  // Returns the answer to a stream whose first frame is these bytes.
  absl::StatusOr<v1::CoordinatorFrame> Say(const std::string& hex) {
    v1::AgentFrame frame;
    EXPECT_TRUE(frame.ParseFromString(absl::HexStringToBytes(hex)));
    const auto stub = v1::Session::NewStub(*rpc::Connect(*coordinator_->first_line()));
    grpc::ClientContext context;
    context.set_wait_for_ready(true);
    rpc::SetTimeout(context, absl::Seconds(20));
    const auto stream = stub->Attach(&context);
    stream->Write(frame);
    v1::CoordinatorFrame reply;
    if (stream->Read(&reply)) {
      context.TryCancel();
      (void)stream->Finish();
      return reply;
    }
    return rpc::FromGrpc(stream->Finish());
  }

  std::unique_ptr<Child> coordinator_;
  std::unique_ptr<agent::ProcessHost> host_;
};

// hello { protocol_min: 1 protocol_max: 1 node: "n" agent_incarnation: 5 }: all that the first
// agents said.
TEST_F(OtherAgents, FirstVersion_IsWelcome) {
  const auto reply =
      Say("1a1008011001"
          "22016e"
          "290500000000000000");
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->welcome().protocol(), 1u);
  EXPECT_FALSE(reply->welcome().session_id().empty());
}

// Protocols 1 to 9, and a field 99 that this coordinator does not know.
TEST_F(OtherAgents, Newer_IsMetAtTheCommonVersion) {
  const auto reply =
      Say("1a1508011009"
          "22016e"
          "290500000000000000"
          "9a06020801");
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->welcome().protocol(), 1u);
}

TEST_F(OtherAgents, TooOldOrTooNew_AreToldTheVersions) {
  // protocol_min and _max 0 (not on the wire); then 2 to 9.
  for (const char* hex : {"1a0c"
                          "22016e"
                          "290500000000000000",
                          "1a1008021009"
                          "22016e"
                          "290500000000000000"}) {
    const auto reply = Say(hex);
    EXPECT_EQ(reply.status().code(), absl::StatusCode::kFailedPrecondition) << reply.status();
    EXPECT_THAT(std::string(reply.status().message()),
                HasSubstr("this coordinator speaks 1: use matching versions"));
  }
}

// Adds what a newer program sends.
template <typename M>
M WithUnknownField(M message) {
  message.GetReflection()->MutableUnknownFields(&message)->AddLengthDelimited(1999, "new");
  return message;
}

// One job of an agent that acknowledges nothing, sends no beats and recalls nothing, and of a
// worker that is newer than the coordinator and sends fields it does not know.
TEST_F(OtherAgents, OldAgentAndNewerWorker_RunAJobTogether) {
  const auto fence = [](int rank, uint64_t generation) {
    v1::Fence fence;
    fence.set_job_id("j");
    fence.set_worker_id(absl::StrCat("w", rank));
    fence.set_incarnation(7);
    fence.set_generation(generation);
    return fence;
  };
  const auto join = [&](int rank) {
    v1::JoinRequest request;
    *request.mutable_fence() = fence(rank, 0);
    request.mutable_spec()->set_min_workers(2);
    request.mutable_spec()->set_max_workers(2);
    request.set_preferred_rank(rank);
    return request;
  };
  const auto arrive = [&](int rank, uint64_t generation) {
    v1::ArriveRequest request;
    *request.mutable_fence() = fence(rank, generation);
    request.set_barrier_id("b");
    request.set_rank(rank);
    return request;
  };
  const auto channel = *rpc::Connect(*coordinator_->first_line());
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  rpc::SetTimeout(context, absl::Seconds(20));
  const auto stream = v1::Session::NewStub(channel)->Attach(&context);
  v1::AgentFrame frame;
  frame.mutable_hello()->set_protocol_min(1);
  frame.mutable_hello()->set_protocol_max(1);
  frame.mutable_hello()->set_node("old");
  frame.mutable_hello()->set_agent_incarnation(5);
  ASSERT_TRUE(stream->Write(frame));
  uint64_t seq = 0;
  const auto send = [&](v1::Op op) {
    v1::AgentFrame ops;
    ops.set_seq(++seq);
    op.set_op_id(seq);
    *ops.mutable_ops()->add_ops() = std::move(op);
    ASSERT_TRUE(stream->Write(ops));
  };
  const auto result = [&] {
    v1::CoordinatorFrame reply;
    while (stream->Read(&reply)) {
      if (reply.results().results_size() > 0) return reply.results().results(0);
    }
    ADD_FAILURE() << stream->Finish().error_message();
    return v1::OpResult();
  };
  v1::Op op;
  *op.mutable_join() = join(0);
  send(op);
  const auto call = [&](auto method, const auto& request, auto* reply, auto& stub) {
    grpc::ClientContext unary;
    unary.set_wait_for_ready(true);
    rpc::SetTimeout(unary, absl::Seconds(20));
    const grpc::Status status = ((*stub).*method)(&unary, request, reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
  };
  const auto rendezvous = v1::Rendezvous::NewStub(channel);
  const auto barrier = v1::Barrier::NewStub(channel);
  v1::JoinReply seat;
  call(&v1::Rendezvous::Stub::Join, WithUnknownField(join(1)), &seat, rendezvous);
  EXPECT_EQ(seat.rank(), 1);
  EXPECT_EQ(result().join().rank(), 0);
  *op.mutable_arrive() = arrive(0, seat.generation());
  send(op);
  v1::ArriveReply passed;
  call(&v1::Barrier::Stub::Arrive, WithUnknownField(arrive(1, seat.generation())), &passed,
       barrier);
  EXPECT_EQ(passed.report().state(), v1::BARRIER_STATE_PASSED);
  EXPECT_EQ(result().arrive().report().state(), v1::BARRIER_STATE_PASSED);
  context.TryCancel();
  (void)stream->Finish();
}

}  // namespace
}  // namespace muster::chaos
