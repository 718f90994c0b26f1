#include "rpc/token.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/secret_file.h"
#include "base/status_macros.h"
#include "rpc/status.h"

namespace muster::rpc {
namespace {

constexpr char kHeader[] = "authorization";
constexpr absl::string_view kScheme = "Bearer ";
constexpr size_t kLongestToken = 1024;  // gRPC refuses headers of more than 8 KiB, all together

class TokenSender final : public grpc::experimental::Interceptor {
 public:
  explicit TokenSender(const std::string& value) : value_(value) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(
            grpc::experimental::InterceptionHookPoints::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->emplace(kHeader, value_);
    }
    methods->Proceed();
  }

 private:
  const std::string& value_;  // the factory's, which lives as long as the channel
};

class TokenSenders final : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  explicit TokenSenders(absl::string_view token) : value_(absl::StrCat(kScheme, token)) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(
      grpc::experimental::ClientRpcInfo*) override {
    return new TokenSender(value_);
  }

 private:
  const std::string value_;
};

}  // namespace

absl::StatusOr<std::string> ReadToken(const std::string& path, absl::string_view what) {
  MUSTER_ASSIGN_OR_RETURN(const std::string text,
                          ReadSecretFile(path, what, "token", kLongestToken + 2));
  return ParseToken(text, absl::StrCat(what, ": '", path, "'"));
}

absl::StatusOr<std::string> ParseToken(absl::string_view text, absl::string_view what) {
  const absl::string_view token = absl::StripAsciiWhitespace(text);
  if (token.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " is empty: write a random token into it"));
  }
  if (token.size() > kLongestToken || !std::all_of(token.begin(), token.end(), [](char c) {
        return absl::ascii_isgraph(static_cast<unsigned char>(c));
      })) {
    return absl::InvalidArgumentError(absl::StrCat(what, " holds no token: one line of at most ",
                                                   kLongestToken,
                                                   " letters, digits and punctuation is needed"));
  }
  return std::string(token);
}

std::string NewToken() { return absl::StrCat(RandomHex(), RandomHex(), RandomHex(), RandomHex()); }

std::optional<absl::string_view> BearerToken(
    const std::multimap<grpc::string_ref, grpc::string_ref>& metadata) {
  const auto it = metadata.find(kHeader);
  if (it == metadata.end()) return std::nullopt;
  absl::string_view given(it->second.data(), it->second.size());
  if (!absl::ConsumePrefix(&given, kScheme)) return std::nullopt;
  return given;
}

bool SameSecret(absl::string_view given, absl::string_view wanted) {
  const absl::string_view other = given.size() == wanted.size() ? given : wanted;
  volatile uint8_t difference = given.size() == wanted.size() ? 0 : 1;
  for (size_t i = 0; i < wanted.size(); ++i) {
    difference = static_cast<uint8_t>(
        difference | (static_cast<uint8_t>(other[i]) ^ static_cast<uint8_t>(wanted[i])));
  }
  return difference == 0;
}

absl::Status BadToken(bool has_token) {
  return ErrorWithReason(
      absl::StatusCode::kUnauthenticated,
      absl::StrCat(has_token ? "this coordinator does not know the token of this call"
                             : "this coordinator requires a token with every call",
                   ": give --token_file (or MUSTER_TOKEN_FILE), a file with a token that the "
                   "coordinator knows"),
      v1::ERROR_REASON_BAD_TOKEN);
}

absl::Status CheckToken(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata,
                        absl::string_view token) {
  const std::optional<absl::string_view> given = BearerToken(metadata);
  if (given.has_value() && SameSecret(*given, token)) return absl::OkStatus();
  return BadToken(given.has_value());
}

std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface> SendToken(
    absl::string_view token) {
  return std::make_unique<TokenSenders>(token);
}

}  // namespace muster::rpc
