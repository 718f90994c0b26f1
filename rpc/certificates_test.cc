#include "rpc/certificates.h"

#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/muster/v1/trigger.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/echo_triggers.h"
#include "rpc/server.h"
#include "rpc/status.h"

namespace muster::rpc {
namespace {

using ::testing::HasSubstr;

// Makes a CA, and in `folder`/NAME a certificate and key that it has signed, valid for `days`.
void MakeCertificates(const std::string& folder, const std::string& name, int days = 2) {
  const std::string into = absl::StrCat(folder, "/", name);
  const std::string make = absl::StrCat(
      "mkdir -p ", into, " && cd ", folder,
      " && { test -f ca.pem || openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 "
      "-nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem; } 2>/dev/null && "
      "openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=",
      name, " -keyout ", into, "/key.pem -out ", into,
      "/csr.pem 2>/dev/null && printf 'subjectAltName=DNS:", name, ",IP:127.0.0.1,IP:::1' > ", into,
      "/ext && openssl x509 -req -in ", into, "/csr.pem -CA ca.pem -CAkey ca.key -CAcreateserial ",
      "-days ", days, " -extfile ", into, "/ext -out ", into, "/cert.pem 2>/dev/null");
  ASSERT_EQ(std::system(make.c_str()), 0) << make;
}
TlsFiles CertificatesIn(const std::string& folder, const std::string& name) {
  return {.ca = folder + "/ca.pem",
          .cert = absl::StrCat(folder, "/", name, "/cert.pem"),
          .key = absl::StrCat(folder, "/", name, "/key.pem")};
}

// Answers with the name in the certificate that the client showed.
class NameOfCaller final : public v1::Triggers::Service {
 public:
  grpc::Status Raise(grpc::ServerContext* context, const v1::RaiseTriggerRequest*,
                     v1::RaiseTriggerReply*) override {
    const auto names = context->auth_context()->GetPeerIdentity();
    MutexLock lock(&mu_);
    name_ = names.empty() ? "" : std::string(names[0].data(), names[0].size());
    return grpc::Status::OK;
  }
  std::string name() {
    MutexLock lock(&mu_);
    return name_;
  }

 private:
  Mutex mu_;
  std::string name_ ABSL_GUARDED_BY(mu_);
};

TEST(Tls, CertificatesThatAreReplaced_AreUsedWithoutARestart) {
  const TestFolder folder;
  MakeCertificates(folder.path(), "first");
  MakeCertificates(folder.path(), "second");
  // Both sides read the pair through a link, which changes in one step.
  const auto use = [&](const std::string& name) {
    ASSERT_EQ(symlink(folder.Path(name).c_str(), folder.Path("next").c_str()), 0);
    ASSERT_EQ(rename(folder.Path("next").c_str(), folder.Path("current").c_str()), 0);
  };
  use("first");
  const TlsFiles files = CertificatesIn(folder.path(), "current");
  NameOfCaller service;
  auto server = Server::Start({.listen = "127.0.0.1:0", .tls = files, .tls_look = absl::Seconds(1)},
                              {&service});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto name_by = [&](const ChannelOptions& options) {
    auto channel = Connect((*server)->address(), options);
    EXPECT_TRUE(channel.ok()) << channel.status();
    EXPECT_TRUE(Raise(*channel, "x", 5).ok());
    return service.name();
  };
  EXPECT_EQ(name_by({.tls = files, .own_connection = true}), "first");
  // A new channel, with a connection of its own, shows and expects the new certificates.
  use("second");
  EXPECT_EQ(name_by({.tls = files, .own_connection = true}), "second");
  // A client that expects the name in the server's new certificate connects at last.
  const ChannelOptions expects{.tls = CertificatesIn(folder.path(), "first"),
                               .tls_server_name = "second",
                               .own_connection = true};
  auto channel = Connect((*server)->address(), expects);
  EXPECT_TRUE(WaitUntilConnected(**channel, (*server)->address(), absl::Minutes(1)).ok());
  EXPECT_EQ(name_by({.tls = CertificatesIn(folder.path(), "first"), .own_connection = true}),
            "first");
}

TEST(Tls, AddressOfTheSixthVersion_IsThatOfTheCertificate) {
  const TestFolder folder;
  MakeCertificates(folder.path(), "first");
  const TlsFiles files = CertificatesIn(folder.path(), "first");
  EchoTriggers service;
  auto server = Server::Start({.listen = "[::1]:0", .tls = files}, {&service});
  if (!server.ok()) {  // a machine without it
    EXPECT_TRUE(absl::IsUnavailable(server.status())) << server.status();
    return;
  }
  EXPECT_EQ(*Raise(*Connect((*server)->address(), {.tls = files}), "x", 5), 5);
}

TEST(Tls, CertificateThatIsOptional_IsCheckedIfItIsShown) {
  const TestFolder folder;
  MakeCertificates(folder.path(), "first");
  const TestFolder elsewhere;
  MakeCertificates(elsewhere.path(), "stranger");
  const TlsFiles files = CertificatesIn(folder.path(), "first");
  NameOfCaller service;
  ServerOptions options{.listen = "127.0.0.1:0", .tls = files, .certificate_optional = true};
  EXPECT_FALSE(Server::Start(options, {&service}).ok());  // nothing else to know callers by
  options.checks_token = true;
  auto server = Server::Start(options, {&service});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto call = [&](TlsFiles shown) {
    shown.ca = files.ca;
    return Raise(*Connect((*server)->address(), {.tls = shown, .own_connection = true}), "x", 5)
        .ok();
  };
  EXPECT_TRUE(call(files));
  EXPECT_EQ(service.name(), "first");
  EXPECT_TRUE(call({}));
  EXPECT_EQ(service.name(), "");
  auto stranger = Connect((*server)->address(),
                          {.tls = {.ca = files.ca,
                                   .cert = CertificatesIn(elsewhere.path(), "stranger").cert,
                                   .key = CertificatesIn(elsewhere.path(), "stranger").key},
                           .own_connection = true});
  EXPECT_FALSE(WaitUntilConnected(**stranger, (*server)->address(), absl::Milliseconds(300)).ok());
}

TEST(Tls, BadCertificates_AreNamedOnBothSides) {
  const TestFolder folder;
  MakeCertificates(folder.path(), "good");
  MakeCertificates(folder.path(), "other");
  MakeCertificates(folder.path(), "expired", /*days=*/-1);
  EchoTriggers service;
  TlsFiles mixed = CertificatesIn(folder.path(), "good");
  mixed.key = CertificatesIn(folder.path(), "other").key;
  TlsFiles no_key = CertificatesIn(folder.path(), "good");
  no_key.key = no_key.cert;
  TlsFiles no_ca = CertificatesIn(folder.path(), "good");
  no_ca.ca = no_ca.key;
  const std::pair<TlsFiles, const char*> kCases[] = {
      {mixed, "is not the key of the certificate in"},
      {no_key, "holds no private key"},
      {no_ca, "holds no certificate"},
      {CertificatesIn(folder.path(), "expired"), "has expired on "}};
  for (const auto& [files, what] : kCases) {
    const absl::Status served =
        Server::Start({.listen = "127.0.0.1:0", .tls = files}, {&service}).status();
    EXPECT_EQ(served.code(), absl::StatusCode::kInvalidArgument) << what;
    EXPECT_THAT(std::string(served.message()), HasSubstr(what));
    const absl::Status connected = Connect("127.0.0.1:1", {.tls = files}).status();
    EXPECT_EQ(connected.code(), absl::StatusCode::kInvalidArgument) << what;
    EXPECT_THAT(std::string(connected.message()), HasSubstr(what));
  }
}

}  // namespace
}  // namespace muster::rpc
