#include "rpc/callback_threads.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "base/mutex.h"

namespace muster::rpc {
namespace {

// A call whose context, and so the channel, lives as long as its callback does.
struct Call {
  ~Call() { ended->Notify(); }
  std::shared_ptr<Notification> ended = std::make_shared<Notification>();
  grpc::ClientContext context;
  grpc::Slice text{"any"};
  grpc::ByteBuffer request{&text, 1}, reply;
};

// Orders the writes before a call before its callback. gRPC does so as well, but ThreadSanitizer
// does not see it.
std::atomic<bool> begun = false;

TEST(KeepCallbackThreads, LastReferenceToAChannel_MayDropOnACallbackThread) {
  for (int round = 0; round < 50; ++round) {
    auto channel = grpc::CreateChannel("unix:/nowhere/at/all", grpc::InsecureChannelCredentials());
    KeepCallbackThreads(channel);
    grpc::GenericStub stub(channel);
    auto call = std::make_shared<Call>();
    const auto ended = call->ended;
    call->context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(1));
    Call* const raw = call.get();
    Notification released;
    begun.store(true, std::memory_order_release);
    stub.UnaryCall(&raw->context, "/none/None", {}, &raw->request, &raw->reply,
                   [call = std::move(call), &released](const grpc::Status& status) {
                     EXPECT_TRUE(begun.load(std::memory_order_acquire));
                     EXPECT_FALSE(status.ok());
                     released.WaitForNotification();
                   });
    channel.reset();
    stub = grpc::GenericStub(nullptr);
    released.Notify();
    ended->WaitForNotification();
  }
}

}  // namespace
}  // namespace muster::rpc
