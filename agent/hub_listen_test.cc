#include "agent/hub_listen.h"

#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::HasSubstr;

std::string TokenFile() {
  const std::string path = TestPath("token");
  EXPECT_TRUE(WriteFileAtomically(path, "secret\n").ok());
  EXPECT_EQ(chmod(path.c_str(), 0600), 0);
  return path;
}

const rpc::ChannelOptions kToken = {.tls = {.ca = "ca", .cert = "cert", .key = "key"},
                                    .token_file = "token"};
const rpc::ChannelOptions kCertificate = {.tls = {.ca = "ca", .cert = "cert", .key = "key"}};

TEST(HubListen, Token_IsAskedForInsteadOfCertificates) {
  rpc::ChannelOptions channel = kToken;
  channel.token_file = TokenFile();
  const auto hub = HubListenOptions("10.0.0.6:0", "10.0.0.5:29400", channel);
  ASSERT_TRUE(hub.ok()) << hub.status();
  EXPECT_EQ(hub->token, "secret");
  const rpc::ServerOptions* const options = &hub->server;
  EXPECT_EQ(options->listen, "10.0.0.6:0");
  EXPECT_TRUE(options->checks_token);
  EXPECT_EQ(options->tls.cert, "cert");
  EXPECT_EQ(options->tls.key, "key");
  EXPECT_EQ(options->tls.ca, "");
  EXPECT_FALSE(options->insecure);
}

TEST(HubListen, Certificates_AreAskedForWithoutAToken) {
  const auto hub = HubListenOptions("[fd00::6]:0", "10.0.0.5:29400", kCertificate);
  ASSERT_TRUE(hub.ok()) << hub.status();
  const rpc::ServerOptions* const options = &hub->server;
  EXPECT_EQ(options->tls.ca, "ca");
  EXPECT_FALSE(options->checks_token);
  EXPECT_FALSE(options->insecure);
}

TEST(HubListen, InsecureCoordinatorOfThisMachine_MakesItsHubsInsecure) {
  const auto hub = HubListenOptions("127.0.0.1:0", "127.0.0.1:29400", {});
  ASSERT_TRUE(hub.ok()) << hub.status();
  const rpc::ServerOptions* const options = &hub->server;
  EXPECT_TRUE(options->insecure);
  EXPECT_FALSE(HubListenOptions("127.0.0.1:0", "127.0.0.1:29400", {.token_file = TokenFile()})
                   ->server.insecure);
}

TEST(HubListen, UnixSocket_IsForThisUser) {
  const auto hub = HubListenOptions("unix:/tmp/hub", "unix:/tmp/coordinator", {});
  ASSERT_TRUE(hub.ok()) << hub.status();
  const rpc::ServerOptions* const options = &hub->server;
  EXPECT_EQ(options->only_user, geteuid());
}

TEST(HubListen, AddressThatOthersCannotUse_IsRefused) {
  const auto error = [](const char* listen, const char* coordinator,
                        const rpc::ChannelOptions& channel) {
    const absl::Status status = HubListenOptions(listen, coordinator, channel).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("hub_listen"));
    return std::string(status.message());
  };
  EXPECT_THAT(error("0.0.0.0:0", "10.0.0.5:29400", kToken),
              HasSubstr("name an address of this machine"));
  EXPECT_THAT(error("[0::0]:0", "10.0.0.5:29400", kToken),
              HasSubstr("name an address of this machine"));
  EXPECT_THAT(error("[::]:0", "127.0.0.1:29400", {}), HasSubstr("name an address of this machine"));
  EXPECT_THAT(error("127.0.0.1:0", "10.0.0.5:29400", kToken), HasSubstr("on another address"));
  EXPECT_THAT(error("unix:/tmp/hub", "10.0.0.5:29400", kToken), HasSubstr("on another address"));
  EXPECT_THAT(error("somewhere", "10.0.0.5:29400", kToken), HasSubstr("has no port"));
  EXPECT_THAT(error("10.0.0.6:0", "127.0.0.1:29400", {}), HasSubstr("--tls_cert"));
  EXPECT_THAT(error("10.0.0.6:0", "10.0.0.5:29400", {.tls = {.ca = "ca"}, .token_file = "token"}),
              HasSubstr("--tls_cert"));
  EXPECT_THAT(error("127.0.0.1:0", "unix:/tmp/coordinator", {}), HasSubstr("unix:PATH"));
}

}  // namespace
}  // namespace muster::agent
