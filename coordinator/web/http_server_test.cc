#include "coordinator/web/http_server.h"

#include <httplib.h>

#include "gtest/gtest.h"

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

TEST(HttpServer, TakenPort_IsRefused) {
  auto server = HttpServer::Start("127.0.0.1", 0, {});
  ASSERT_TRUE(server.ok());
  EXPECT_EQ(HttpServer::Start("127.0.0.1", (*server)->port(), {}).status().code(),
            absl::StatusCode::kAlreadyExists);
}

TEST(HttpServer, StoppedAtOnce_Ends) {
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(HttpServer::Start("127.0.0.1", 0, {}).ok());
}

}  // namespace
}  // namespace muster::coordinator
