#include "rpc/server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <grpc/support/log.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/trigger.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/echo_triggers.h"
#include "rpc/status.h"
#include "rpc/test_listener.h"
#include "rpc/token.h"

namespace muster::rpc {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Server, PortZero_BindsReportsAndServes) {
  EchoTriggers service;
  auto server = Server::Start({.insecure = true}, {&service});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_GT((*server)->port(), 0);
  auto channel = Connect((*server)->address());
  ASSERT_TRUE(channel.ok()) << channel.status();
  EXPECT_TRUE(WaitUntilConnected(**channel, (*server)->address(), absl::Seconds(30)).ok());
  EXPECT_EQ(*Raise(*channel, "x", 41), 41);
  EXPECT_EQ(GetReason(Raise(*channel, "stale", 1).status()), v1::ERROR_REASON_STALE_GENERATION);
}

TEST(Server, UnixSocketOfAnotherUser_LetsNobodyIn) {
  EchoTriggers service;
  const TestFolder folder = TestFolder::ForSockets();
  const std::string path = folder.Path("socket");
  for (const uid_t user : {geteuid(), geteuid() + 1}) {
    auto server = Server::Start({.listen = "unix:" + path, .only_user = user}, {&service});
    ASSERT_TRUE(server.ok()) << server.status();
    auto channel = *Connect((*server)->address());
    if (user == geteuid()) {
      EXPECT_EQ(*Raise(channel, "x", 41), 41);
      continue;
    }
    auto stub = v1::Triggers::NewStub(channel);
    grpc::ClientContext context;
    SetTimeout(context, absl::Minutes(1));
    v1::RaiseTriggerReply reply;
    EXPECT_EQ(stub->Raise(&context, v1::RaiseTriggerRequest(), &reply).error_code(),
              grpc::StatusCode::UNAVAILABLE);
  }
  EXPECT_EQ(rmdir(folder.path().c_str()), 0) << "the server leaves no socket behind";
}

TEST(Server, UnixSocketThatServesAnotherUser_SaysSoToRootAndOnceInTheLog) {
  if (geteuid() != 0) {
    std::cerr << "not tested: all others are stopped by the file\n";
    return;
  }
  EchoTriggers service;
  const TestFolder folder = TestFolder::ForSockets();
  const std::string path = folder.Path("socket");
  constexpr uid_t kOther = 65534;
  ::testing::internal::CaptureStderr();
  {
    auto server = Server::Start({.listen = "unix:" + path, .only_user = kOther}, {&service});
    ASSERT_TRUE(server.ok()) << server.status();
    ASSERT_EQ(chown(path.c_str(), kOther, static_cast<gid_t>(-1)), 0);
    for (int i = 0; i < 3; ++i) {
      auto channel = *Connect((*server)->address(), {.own_connection = true});
      const absl::Status status =
          WaitUntilConnected(*channel, (*server)->address(), absl::Minutes(5));
      EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr("user 0 may not connect to the coordinator's socket " + path));
    }
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  const size_t first = log.find("only user 65534 may enter");
  EXPECT_NE(first, std::string::npos) << log;
  EXPECT_EQ(log.find("may enter", first + 20), std::string::npos) << log;
}

// For root, on file systems where the file belongs to the user nobody (NFS), and for a stopped
// server.
TEST(WaitUntilConnected, SocketOfAnotherUserThatSaysNothing_IsNotTakenForARefusal) {
  if (geteuid() != 0) {
    std::cerr << "not tested: only root may give a file to another user\n";
    return;
  }
  const TestFolder folder = TestFolder::ForSockets();
  const std::string path = folder.Path("s");
  const OwnedFd silent(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  memcpy(name.sun_path, path.c_str(), path.size() + 1);
  ASSERT_EQ(bind(silent.get(), reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  ASSERT_EQ(listen(silent.get(), 16), 0);
  ASSERT_EQ(chown(path.c_str(), 65534, static_cast<gid_t>(-1)), 0);
  std::thread server([&] {
    for (;;) {
      const OwnedFd connection(accept(silent.get(), nullptr, nullptr));
      if (!connection.open()) return;
      // Closes what speaks first, as gRPC does, and nothing else.
      char bytes[64];
      EXPECT_GE(read(connection.get(), bytes, sizeof(bytes)), 0);
    }
  });
  const auto channel = *Connect("unix:" + path, {.own_connection = true});
  const absl::Status status = WaitUntilConnected(*channel, "unix:" + path, absl::Seconds(1));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  shutdown(silent.get(), SHUT_RDWR);
  server.join();
}

TEST(Server, UnixSocket_ServesAndReplacesADeadOne) {
  const TestFolder folder = TestFolder::ForSockets();
  const std::string path = folder.Path("s");
  EchoTriggers service;
  for (int round = 0; round < 2; ++round) {
    auto server = Server::Start({.listen = "unix:" + path}, {&service});
    ASSERT_TRUE(server.ok()) << server.status();
    EXPECT_EQ(*Raise(*Connect((*server)->address()), "x", round), round);
    EchoTriggers second;
    EXPECT_EQ(Server::Start({.listen = "unix:" + path}, {&second}).status().code(),
              absl::StatusCode::kAlreadyExists);
  }
  ASSERT_TRUE(RemoveTree(folder.path()).ok());
  const absl::Status nowhere = Server::Start({.listen = "unix:" + path}, {&service}).status();
  EXPECT_EQ(nowhere.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(nowhere.message().find(folder.path()), absl::string_view::npos) << nowhere;
}

TEST(Server, UnixSocketThatAnotherHasReplaced_IsNotRemovedAtTheEnd) {
  const TestFolder folder = TestFolder::ForSockets();
  const std::string path = folder.Path("s");
  EchoTriggers service, other;
  auto first = Server::Start({.listen = "unix:" + path}, {&service});
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_EQ(unlink(path.c_str()), 0);
  auto second = Server::Start({.listen = "unix:" + path}, {&other});
  ASSERT_TRUE(second.ok()) << second.status();
  first->reset();
  EXPECT_EQ(*Raise(*Connect((*second)->address()), "x", 1), 1);
  second->reset();
  EXPECT_EQ(rmdir(folder.path().c_str()), 0) << "nothing else is left";
}

TEST(Server, UnixSocketThatTellsNothing_IsLeftAlone) {
  const TestFolder folder = TestFolder::ForSockets();
  const std::string path = folder.Path("s");
  // A datagram socket: connecting fails although a process holds it.
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  memcpy(name.sun_path, path.c_str(), path.size() + 1);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&name), sizeof(name)), 0);
  EchoTriggers service;
  const absl::Status status = Server::Start({.listen = "unix:" + path}, {&service}).status();
  EXPECT_NE(status.message().find("cannot determine whether a process listens on unix:" + path),
            absl::string_view::npos)
      << status;
  EXPECT_EQ(unlink(path.c_str()), 0) << "it is still there";
  close(fd);
}

// Callers need no token to connect, and each connection costs a descriptor.
TEST(Server, ConnectionThatIsNotSetUp_IsClosed) {
  EchoTriggers service;
  const auto server =
      Server::Start({.insecure = true, .setup_timeout = absl::Milliseconds(20)}, {&service});
  ASSERT_TRUE(server.ok()) << server.status();
  const OwnedFd silent(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>((*server)->port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const timeval patience = {.tv_sec = 60, .tv_usec = 0};
  ASSERT_EQ(setsockopt(silent.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
  ASSERT_EQ(connect(silent.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  char bytes[256];
  ssize_t size = 1;
  while (size > 0) size = read(silent.get(), bytes, sizeof(bytes));  // HTTP/2's first words
  EXPECT_TRUE(size == 0 || errno == ECONNRESET) << strerror(errno);
}

TEST(Server, ConnectionWithoutCalls_IsClosedAndMadeAgain) {
  EchoTriggers service;
  const auto server =
      Server::Start({.insecure = true, .idle_timeout = absl::Milliseconds(50)}, {&service});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto channel = *Connect((*server)->address(), {.own_connection = true});
  // The first connection has no call, like that of a stranger.
  EXPECT_TRUE(WaitUntilConnected(*channel, (*server)->address(), absl::Minutes(1)).ok());
  for (int round = 0; round < 3; ++round) {
    // A call may come as the connection is closed.
    WaitUntil([&] { return Raise(channel, "x", 1).ok(); });
    const auto deadline = std::chrono::system_clock::now() + std::chrono::minutes(1);
    while (channel->GetState(false) == GRPC_CHANNEL_READY) {
      ASSERT_TRUE(channel->WaitForStateChange(GRPC_CHANNEL_READY, deadline));
    }
  }
}

// gRPC closes an idle connection after this time or twice as long. One that the server closes cuts
// off the call that is on its way.
TEST(Channel, Idle_IsClosedByTheClientFirst) {
  EXPECT_LE(2 * ChannelOptions().idle_timeout, ServerOptions().idle_timeout);
}

// Otherwise callers without a token could keep a coordinator from its journal.
TEST(Server, CrowdOfConnections_LeavesDescriptorsForTheProcess) {
  EchoTriggers service;
  const auto server = Server::Start({.insecure = true}, {&service});
  ASSERT_TRUE(server.ok()) << server.status();
  constexpr int kCrowd = 64, kFree = 32;
  std::vector<OwnedFd> crowd;
  for (int i = 0; i < kCrowd; ++i)
    crowd.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto lowest_free = [] {
    const OwnedFd next(open("/dev/null", O_RDONLY | O_CLOEXEC));
    return next.get();
  };
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit low = before;
  low.rlim_cur = static_cast<rlim_t>(lowest_free() + kFree);
  const int kept = static_cast<int>(low.rlim_cur / 16);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>((*server)->port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  for (const OwnedFd& one : crowd) {
    EXPECT_EQ(connect(one.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  const int most = static_cast<int>(low.rlim_cur) - kept;
  WaitUntil([&] {
    const int next = lowest_free();
    return next < 0 || next >= most;
  });
  // Excludes the descriptor with which the server looks.
  for (int i = 0; i < 1000; ++i) {
    std::vector<OwnedFd> own;
    for (int j = 1; j < kept; ++j) own.emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
    ASSERT_TRUE(own.back().open()) << i;
  }
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(Server, SecondOnThePort_FailsWithTheAddress) {
  EchoTriggers service;
  auto server = Server::Start({.insecure = true}, {&service});
  ASSERT_TRUE(server.ok());
  EchoTriggers other;
  const absl::Status status =
      Server::Start({.listen = (*server)->address(), .insecure = true}, {&other}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()), HasSubstr((*server)->address()));
  EXPECT_THAT(std::string(status.message()), HasSubstr("another process has the port"));
}

TEST(Server, CallersThatItWouldNotKnow_AreRefusedWithTheWaysOut) {
  const struct {
    ServerOptions options;
    const char* what;  // null: it may start
  } kCases[] = {
      {{.listen = "127.0.0.1:0"}, "without authentication of callers"},
      {{.listen = "[::1]:0"}, "without authentication of callers"},
      {{.listen = "127.0.0.1:0", .insecure = true}, nullptr},
      {{.listen = "127.0.0.1:0", .checks_token = true}, nullptr},
      {{.listen = "unix:/tmp/x"}, nullptr},
      {{.listen = "127.0.0.1:0", .tls = {.cert = "c", .key = "k"}},
       "without authentication of callers"},
      {{.listen = "127.0.0.1:0", .tls = {.ca = "a", .cert = "c", .key = "k"}}, nullptr},
      {{.listen = "0.0.0.0:0"}, "without TLS"},
      {{.listen = "0.0.0.0:0", .insecure = true}, "without TLS"},
      {{.listen = "0.0.0.0:0", .checks_token = true}, "travel in clear"},
      {{.listen = "0.0.0.0:0", .tls = {.cert = "c", .key = "k"}},
       "without authentication of callers"},
      {{.listen = "0.0.0.0:0", .tls = {.cert = "c", .key = "k"}, .insecure = true},
       "without authentication of callers"},
      {{.listen = "0.0.0.0:0", .tls = {.ca = "a", .cert = "c", .key = "k"}}, nullptr},
      {{.listen = "0.0.0.0:0", .tls = {.cert = "c", .key = "k"}, .checks_token = true}, nullptr},
  };
  for (const auto& c : kCases) {
    const absl::Status status = CheckCallersAreKnown(c.options);
    if (c.what == nullptr) {
      EXPECT_TRUE(status.ok()) << c.options.listen << ": " << status;
      continue;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(c.what), HasSubstr(c.options.listen), HasSubstr("--token_file"),
                      HasSubstr("--tls_ca")));
  }
  EchoTriggers service;
  EXPECT_EQ(Server::Start({.listen = "127.0.0.1:0"}, {&service}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Server, Reflection_OnlyIfWanted) {
  const auto answered = [](bool wanted) {
    EchoTriggers service;
    auto server = Server::Start({.insecure = true, .reflection = wanted}, {&service});
    grpc::GenericStub stub(*Connect((*server)->address(), {.own_connection = true}));
    grpc::ClientContext context;
    SetTimeout(context, absl::Minutes(1));
    context.set_wait_for_ready(true);
    grpc::CompletionQueue queue;
    auto stream = stub.PrepareCall(
        &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
    const auto next = [&] {
      void* tag = nullptr;
      bool ok = false;
      EXPECT_TRUE(queue.Next(&tag, &ok));
      return ok;
    };
    stream->StartCall(nullptr);
    next();
    stream->WritesDone(nullptr);
    next();
    grpc::Status status;
    stream->Finish(&status, nullptr);
    next();
    queue.Shutdown();
    return status.error_code() != grpc::StatusCode::UNIMPLEMENTED;
  };
  EXPECT_FALSE(answered(false));
  EXPECT_TRUE(answered(true));
}

TEST(Server, BadTlsFiles_AreNamed) {
  EchoTriggers service;
  EXPECT_THAT(std::string(Server::Start({.tls = {.cert = "/nowhere/c.pem", .key = "/nowhere/k.pem"},
                                         .checks_token = true},
                                        {&service})
                              .status()
                              .message()),
              HasSubstr("/nowhere/c.pem"));
  EXPECT_THAT(
      std::string(Server::Start({.tls = {.cert = "/c.pem"}}, {&service}).status().message()),
      HasSubstr("go together"));
  const std::string path = TestPath("not.pem");
  std::ofstream(path) << "hello";
  EXPECT_THAT(std::string(Server::Start({.tls = {.cert = path, .key = path}, .checks_token = true},
                                        {&service})
                              .status()
                              .message()),
              HasSubstr("not a PEM file"));
}

TEST(Server, NotOurAddress_IsNamed) {
  EchoTriggers service;
  EXPECT_THAT(std::string(Server::Start({.listen = "localhost"}, {&service}).status().message()),
              HasSubstr("no port"));
}

// The certificate is made by the test: nothing that expires is kept in the tree.
TEST(Server, Tls_ServesOnlyThoseWhoTrustIt) {
  const TestFolder folder;
  const std::string& dir = folder.path();
  const std::string cert = dir + "/cert.pem", key = dir + "/key.pem";
  const std::string make =
      "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj "
      "/CN=muster.test -addext subjectAltName=DNS:muster.test,IP:127.0.0.1 -keyout " +
      key + " -out " + cert + " 2>/dev/null";
  ASSERT_EQ(std::system(make.c_str()), 0);
  EchoTriggers service;
  auto server = Server::Start(
      {.listen = "127.0.0.1:0", .tls = {.cert = cert, .key = key}, .checks_token = true},
      {&service});
  ASSERT_TRUE(server.ok()) << server.status();
  auto trusted = Connect((*server)->address(), {.tls = {.ca = cert}});
  ASSERT_TRUE(trusted.ok()) << trusted.status();
  EXPECT_EQ(*Raise(*trusted, "x", 5), 5);
  auto plain = Connect((*server)->address());
  EXPECT_FALSE(WaitUntilConnected(**plain, (*server)->address(), absl::Milliseconds(200)).ok());

  EchoTriggers strict_service;
  auto strict = Server::Start(
      {.listen = "127.0.0.1:0", .tls = {.ca = cert, .cert = cert, .key = key}}, {&strict_service});
  ASSERT_TRUE(strict.ok()) << strict.status();
  EXPECT_EQ(*Raise(*Connect((*strict)->address(), {.tls = {.ca = cert, .cert = cert, .key = key}}),
                   "x", 6),
            6);
}

TEST(Connect, BadInput_IsRefused) {
  EXPECT_EQ(Connect("127.0.0.1:0").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Connect("somewhere:1").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Connect("127.0.0.1:1", {.tls = {.cert = "x"}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Connect("127.0.0.1:1", {.tls = {.ca = "/nowhere"}}).status().code(),
            absl::StatusCode::kNotFound);
}

TEST(Connect, OffLoopback_WantsTlsAndSomethingToShow) {
  const struct {
    ChannelOptions options;
    const char* what;
  } kCases[] = {
      {{}, "without TLS"},
      {{.token_file = "/nowhere"}, "without TLS"},
      {{.tls = {.ca = "/nowhere"}}, "without authentication"},
  };
  for (const char* address : {"10.0.0.1:1", "0.0.0.0:1", "[2001:db8::1]:1"}) {
    for (const auto& c : kCases) {
      const absl::Status status = Connect(address, c.options).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr(c.what), HasSubstr(address), HasSubstr("--tls_cert"),
                        HasSubstr("--token_file")));
    }
    EXPECT_EQ(
        Connect(address, {.tls = {.ca = "/nowhere"}, .token_file = "/nowhere"}).status().code(),
        absl::StatusCode::kNotFound);
  }
}

class SeenTriggers final : public v1::Triggers::CallbackService {
 public:
  explicit SeenTriggers(std::string token) : token_(std::move(token)) {}
  grpc::ServerUnaryReactor* Raise(grpc::CallbackServerContext* context,
                                  const v1::RaiseTriggerRequest*, v1::RaiseTriggerReply*) override {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    reactor->Finish(ToGrpc(CheckToken(context->client_metadata(), token_)));
    return reactor;
  }

 private:
  const std::string token_;
};

TEST(Connect, TokenFile_GoesWithEveryCall) {
  const std::string path = TestPath("sent-token");
  std::ofstream(path) << "s3cret\n";
  ASSERT_EQ(chmod(path.c_str(), 0600), 0);
  SeenTriggers service("s3cret");
  auto server = Server::Start({.checks_token = true}, {&service});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto channel = Connect((*server)->address(), {.token_file = path});
  ASSERT_TRUE(channel.ok()) << channel.status();
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(Raise(*channel, "x", 1).ok());
  EXPECT_EQ(GetReason(Raise(*Connect((*server)->address()), "x", 1).status()),
            v1::ERROR_REASON_BAD_TOKEN);
  EXPECT_EQ(Connect((*server)->address(), {.token_file = "/nowhere"}).status().code(),
            absl::StatusCode::kNotFound);
}

// Blocks until the channel has failed to connect.
void WaitUntilFailed(grpc::Channel& channel) {
  const auto deadline = std::chrono::system_clock::now() + std::chrono::minutes(1);
  grpc_connectivity_state state = channel.GetState(/*try_to_connect=*/true);
  while (state != GRPC_CHANNEL_TRANSIENT_FAILURE && channel.WaitForStateChange(state, deadline)) {
    state = channel.GetState(/*try_to_connect=*/true);
  }
}

TEST(WaitUntilConnected, NobodyThere_NamesTheAddressAndTheError) {
  const std::string address = "unix:/nonexistent/muster.sock";
  auto channel = Connect(address);
  ASSERT_TRUE(channel.ok());
  WaitUntilFailed(**channel);
  const absl::Status status = WaitUntilConnected(**channel, address, absl::Milliseconds(50));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(std::string(status.message()),
            "no coordinator answers at unix:/nonexistent/muster.sock (1 try in 50ms, No such file "
            "or directory): is it running?");
}

TEST(WaitUntilConnected, PortThatNobodyHolds_SaysHowOftenItTriedAndTheLastError) {
  std::string address;
  {
    const TestListener listener;
    address = "127.0.0.1:" + std::to_string(listener.port());
  }
  auto channel = Connect(address);
  ASSERT_TRUE(channel.ok());
  WaitUntilFailed(**channel);
  const absl::Status status = WaitUntilConnected(**channel, address, absl::Milliseconds(350));
  EXPECT_EQ(std::string(status.message()),
            "no coordinator answers at " + address +
                " (3 tries in 350ms, the last: Connection refused): is it running?");
  EXPECT_EQ(WhyNotConnected(*channel), "Connection refused");
}

// The listener accepts, and sends nothing.
TEST(WaitUntilConnected, ListenerThatDoesNotGreet_SaysSo) {
  const TestListener listener;
  const std::string address = "127.0.0.1:" + std::to_string(listener.port());
  auto channel = Connect(address);
  ASSERT_TRUE(channel.ok());
  const absl::Status status = WaitUntilConnected(**channel, address, absl::Milliseconds(50));
  EXPECT_EQ(std::string(status.message()),
            "no coordinator answers at " + address + " (1 try in 50ms, no reply): is it running?");
}

// A machine under load needs time to greet a new connection; so does a slow link.
TEST(Channel, ServerThatIsSlowToGreet_IsNotGivenUp) {
  const TestListener listener;
  auto channel = Connect("127.0.0.1:" + std::to_string(listener.port()));
  ASSERT_TRUE(channel.ok()) << channel.status();
  (*channel)->GetState(/*try_to_connect=*/true);
  const int connection = accept(listener.fd(), nullptr, nullptr);
  ASSERT_GE(connection, 0);
  // The attempt lives on: the client closes nothing meanwhile.
  pollfd closed = {.fd = connection, .events = POLLRDHUP, .revents = 0};
  EXPECT_EQ(poll(&closed, 1, 1000), 0);
  close(connection);
}

// A client that connects and breaks off costs a line of gRPC's log, but must not fill the disk.
TEST(Process, LinesOfGrpc_AreSoManyAMinute) {
  ASSERT_TRUE(Connect("127.0.0.1:1").ok());  // prepares the process
  testing::internal::CaptureStderr();
  for (int i = 0; i < 1000; ++i) gpr_log(GPR_ERROR, "stranger %d", i);
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("grpc: stranger 0\n"));
  EXPECT_LE(std::count(text.begin(), text.end(), '\n'), 20);
}

}  // namespace
}  // namespace muster::rpc
