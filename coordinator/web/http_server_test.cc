#include "coordinator/web/http_server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <httplib.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/mutate.h"
#include "base/mutex.h"
#include "gtest/gtest.h"

namespace {
std::atomic<int> accepts_to_fail{0};
std::atomic<int> why_they_fail{ENFILE};
}  // namespace

// Replaces the C library's accept(), also for the HTTP library.
extern "C" int accept(int fd, sockaddr* address, socklen_t* bytes) {
  if (accepts_to_fail > 0) {
    --accepts_to_fail;
    errno = why_they_fail;
    return -1;
  }
  return static_cast<int>(syscall(SYS_accept4, fd, address, bytes, 0));
}

namespace muster::coordinator {
namespace {

TEST(HttpServer, Get_ServesHandlersAndNothingElse) {
  auto server = HttpServer::Start(
      "127.0.0.1", 0, {{"/metrics", [] {
                          return HttpServer::Response{
                              .status = 200, .content_type = "text/plain", .body = "x 1\n"};
                        }}});
  ASSERT_TRUE(server.ok()) << server.status();
  httplib::Client client("127.0.0.1", (*server)->port());
  auto response = client.Get("/metrics");
  ASSERT_TRUE(response);
  EXPECT_EQ(response->status, 200);
  EXPECT_EQ(response->body, "x 1\n");
  response = client.Get("/other");
  ASSERT_TRUE(response);
  EXPECT_EQ(response->status, 404);
}

TEST(HttpServer, AcceptThatFailsForAWhile_EndsNothing) {
  accepts_to_fail = 2;
  auto server = HttpServer::Start(
      "127.0.0.1", 0, {{"/healthz", [] { return HttpServer::Response{.body = "ok\n"}; }}});
  ASSERT_TRUE(server.ok()) << server.status();
  httplib::Client client("127.0.0.1", (*server)->port());
  httplib::Result response = client.Get("/healthz");
  while (!response) response = client.Get("/healthz");
  EXPECT_EQ(response->body, "ok\n");
  EXPECT_EQ(accepts_to_fail, 0);
}

TEST(HttpServer, Stop_WhileNothingIsAccepted_DoesNotWait) {
  // The library closes its socket after the first, and tries again after the second.
  for (const int why : {ENFILE, EMFILE}) {
    why_they_fail = why;
    accepts_to_fail = 1 << 30;
    HttpServer::Start("127.0.0.1", 0, {}).value().reset();
    accepts_to_fail = 0;
  }
  why_they_fail = ENFILE;
}

TEST(HttpServer, Stop_ClosesItsFilesAndWarnsOfNothing) {
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                         std::filesystem::directory_iterator());
  };
  const auto before = open_files();
  testing::internal::CaptureStderr();
  for (const bool served : {false, true}) {
    auto server = HttpServer::Start("127.0.0.1", 0, {});
    ASSERT_TRUE(server.ok()) << server.status();
    if (served) httplib::Client("127.0.0.1", (*server)->port()).Get("/");
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(open_files(), before);
}

// After an accept() that has failed the library has closed its socket while requests are served.
TEST(HttpServer, Stop_AfterAFailedAccept_ClosesNoFileOfAnother) {
  std::atomic<int> port{0};
  Notification hung_up;
  const auto handler = [&] {
    // The accept() that waits takes this one, and the next fails.
    accepts_to_fail = 1;
    const httplib::Result other = httplib::Client("127.0.0.1", port).Get("/other");
    hung_up.WaitForNotification();
    return HttpServer::Response{.body = "ok\n"};
  };
  auto server = HttpServer::Start("127.0.0.1", 0, {{"/healthz", handler}});
  ASSERT_TRUE(server.ok()) << server.status();
  std::vector<int> listening;
  for (int fd = 3; fd < 1000; ++fd) {
    int is_listening = 0;
    socklen_t size = sizeof(is_listening);
    getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &is_listening, &size);
    if (is_listening != 0) listening.push_back(fd);
  }
  ASSERT_EQ(listening.size(), 2);  // the library's and ours
  port = (*server)->port();
  std::thread client([&] {
    httplib::Client("127.0.0.1", port).Get("/healthz");
    hung_up.Notify();
  });
  for (const int fd : listening) {
    while (fcntl(fd, F_GETFD) >= 0) std::this_thread::yield();
    ASSERT_EQ(dup2(STDERR_FILENO, fd), fd);
  }
  server->reset();
  for (const int fd : listening) {
    EXPECT_GE(fcntl(fd, F_GETFD), 0);
    close(fd);
  }
  client.join();
}

TEST(HttpServer, AddressOfNobodyHere_IsCalledThat) {
  // An address for documentation.
  const absl::Status status = HttpServer::Start("192.0.2.1", 0, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_NE(status.message().find("is 192.0.2.1 an address of this machine?"), std::string::npos)
      << status;
}

TEST(HttpServer, TakenPort_IsRefused) {
  auto server = HttpServer::Start("127.0.0.1", 0, {});
  ASSERT_TRUE(server.ok());
  EXPECT_EQ(HttpServer::Start("127.0.0.1", (*server)->port(), {}).status().code(),
            absl::StatusCode::kAlreadyExists);
}

int Connect(const HttpServer& server) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(server.port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  return fd;
}

void Send(int fd, const std::string& bytes) {
  EXPECT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

// Returns what comes until the server closes the connection.
std::string ReadAll(int fd) {
  std::string text;
  char bytes[4096];
  for (ssize_t count; (count = recv(fd, bytes, sizeof(bytes), 0)) > 0;)
    text.append(bytes, static_cast<size_t>(count));
  return text;
}

TEST(HttpServer, OtherMethods_HeadHasNoBodyPostIsNotFound) {
  auto server = HttpServer::Start(
      "127.0.0.1", 0, {{"/metrics", [] { return HttpServer::Response{.body = "x 1\n"}; }}});
  ASSERT_TRUE(server.ok()) << server.status();
  httplib::Client client("127.0.0.1", (*server)->port());
  auto response = client.Head("/metrics");
  ASSERT_TRUE(response);
  EXPECT_EQ(response->status, 200);
  EXPECT_EQ(response->get_header_value("Content-Length"), "4");
  response = client.Post("/metrics", "", "text/plain");
  ASSERT_TRUE(response);
  EXPECT_EQ(response->status, 404);
}

TEST(HttpServer, SlowClients_NeitherHoldUpOthersNorTheEnd) {
  auto server = HttpServer::Start(
      "127.0.0.1", 0, {{"/healthz", [] { return HttpServer::Response{.body = "ok\n"}; }}});
  ASSERT_TRUE(server.ok()) << server.status();
  std::vector<int> slow;
  for (int i = 0; i < 4; ++i) {
    slow.push_back(Connect(**server));
    Send(slow.back(), "GET /healthz HTTP/1.1\r\nX-Slow: ");
  }
  auto response = httplib::Client("127.0.0.1", (*server)->port()).Get("/healthz");
  ASSERT_TRUE(response);
  EXPECT_EQ(response->body, "ok\n");
  server->reset();  // waits for none of them
  for (const int fd : slow) {
    ReadAll(fd);
    close(fd);
  }
}

// Each slow client held a thread for ten seconds, and a health check waited for more than a minute.
TEST(HttpServer, CrowdOfSlowClients_MakesRoomForTheNext) {
  auto server = HttpServer::Start(
      "127.0.0.1", 0, {{"/healthz", [] { return HttpServer::Response{.body = "ok\n"}; }}});
  ASSERT_TRUE(server.ok()) << server.status();
  std::vector<int> slow;
  for (int i = 0; i < 64; ++i) {
    slow.push_back(Connect(**server));
    Send(slow.back(), "GET /healthz HTTP/1.1\r\nX-Slow: ");
  }
  auto response = httplib::Client("127.0.0.1", (*server)->port()).Get("/healthz");
  while (!response) response = httplib::Client("127.0.0.1", (*server)->port()).Get("/healthz");
  EXPECT_EQ(response->body, "ok\n");
  for (const int fd : slow) close(fd);
}

TEST(HttpServer, EndlessHeaders_AreCutOff) {
  auto server = HttpServer::Start("127.0.0.1", 0, {});
  ASSERT_TRUE(server.ok()) << server.status();
  const int fd = Connect(**server);
  std::string request = "GET /metrics HTTP/1.1\r\n";
  for (int i = 0; i < 20'000; ++i) request += "X-More: and more\r\n";
  for (size_t at = 0; at < request.size();) {
    const ssize_t count = send(fd, request.data() + at, request.size() - at, MSG_NOSIGNAL);
    if (count <= 0) break;  // cut off already
    at += static_cast<size_t>(count);
  }
  ReadAll(fd);
  close(fd);
}

TEST(HttpServer, TooManyConnections_AreClosed) {
  auto server = HttpServer::Start(
      "127.0.0.1", 0, {{"/healthz", [] { return HttpServer::Response{.body = "ok\n"}; }}});
  ASSERT_TRUE(server.ok()) << server.status();
  std::vector<int> idle;
  for (int i = 0; i < 64; ++i) idle.push_back(Connect(**server));
  const int extra = Connect(**server);
  const std::string request = "GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n";
  send(extra, request.data(), request.size(), MSG_NOSIGNAL);
  const std::string answer = ReadAll(extra);
  // The call is served only if some of the idle ones have made room by now.
  EXPECT_TRUE(answer.empty() || answer.find("ok\n") != std::string::npos) << answer;
  close(extra);
  for (const int fd : idle) close(fd);
  auto response = httplib::Client("127.0.0.1", (*server)->port()).Get("/healthz");
  while (!response) response = httplib::Client("127.0.0.1", (*server)->port()).Get("/healthz");
  EXPECT_EQ(response->body, "ok\n");
}

// Requests with some bytes changed, cut or added, and bytes that are none: the server still serves.
TEST(HttpServer, MutatedRequests_NeverBreakIt) {
  auto server = HttpServer::Start(
      "127.0.0.1", 0, {{"/metrics", [] { return HttpServer::Response{.body = "x 1\n"}; }}});
  ASSERT_TRUE(server.ok()) << server.status();
  const std::vector<std::string> samples = {
      "GET /metrics HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
      "GET /metrics?a=%41&b=%ff HTTP/1.0\r\nRange: bytes=0-1,3-\r\nAccept-Encoding: gzip\r\n\r\n",
      "POST /metrics HTTP/1.1\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbody",
      "POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"};
  std::mt19937 random(20240607);
  for (int i = 0; i < 400; ++i) {
    const std::string& sample = samples[i % samples.size()];
    const std::string bytes = i < 4 ? sample : Mutate(sample, random);
    const int fd = Connect(**server);
    send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    shutdown(fd, SHUT_WR);
    ReadAll(fd);
    close(fd);
  }
  auto response = httplib::Client("127.0.0.1", (*server)->port()).Get("/metrics");
  ASSERT_TRUE(response);
  EXPECT_EQ(response->body, "x 1\n");
}

TEST(HttpServer, StoppedAtOnce_Ends) {
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(HttpServer::Start("127.0.0.1", 0, {}).ok());
}

}  // namespace
}  // namespace muster::coordinator
