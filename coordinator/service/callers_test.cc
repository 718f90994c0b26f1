#include "coordinator/service/callers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/fake_clock.h"
#include "base/file.h"
#include "base/secret_file.h"
#include "base/signature.h"
#include "base/test_folder.h"
#include "rpc/status.h"

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;
using Metadata = std::multimap<grpc::string_ref, grpc::string_ref>;

std::string Line(const std::string& name, const std::string& role, const std::string& token) {
  return absl::StrCat(name, " ", role, " sha256:", absl::BytesToHexString(Sha256(token)), "\n");
}

std::string WhyBad(absl::string_view text) {
  const auto users = Users::Parse(text, "users_file: 'u'");
  EXPECT_TRUE(absl::IsInvalidArgument(users.status())) << text;
  return std::string(users.status().message());
}

TEST(UsersTest, Lines_GiveNamesRolesAndCredentials) {
  const auto users = Users::Parse(
      absl::StrCat("# people\n\n", Line("ann", "submit", "ann's"), "\tbob  view cert # by ours\r\n",
                   Line("ann", "submit", "ann's other one"), "root admin cert"),
      "users_file");
  ASSERT_TRUE(users.ok()) << users.status();
  EXPECT_EQ(users->size(), 3u);
  EXPECT_EQ(users->OfToken("ann's")->name, "ann");
  EXPECT_EQ(users->OfToken("ann's")->role, Role::kSubmit);
  EXPECT_EQ(users->OfToken("ann's other one")->name, "ann");
  EXPECT_EQ(users->OfCertificate("bob")->role, Role::kView);
  EXPECT_EQ(users->OfCertificate("root")->role, Role::kAdmin);
  EXPECT_EQ(users->OfToken("bob"), nullptr);
  EXPECT_EQ(users->OfToken(""), nullptr);
  EXPECT_EQ(users->OfCertificate("ann"), nullptr);
  EXPECT_EQ(users->OfCertificate(""), nullptr);
}

TEST(UsersTest, BadLine_IsNamedWithTheWayOut) {
  EXPECT_EQ(WhyBad("\nann submit"),
            "users_file: 'u': line 2: three words are needed: NAME ROLE CREDENTIAL");
  EXPECT_THAT(WhyBad("ann owner cert"), HasSubstr("role \"owner\" does not exist: use view"));
  EXPECT_THAT(WhyBad("ann attempt cert"), HasSubstr("does not exist"));
  EXPECT_THAT(WhyBad("ann view sha256:12"), HasSubstr("neither sha256: with 64"));
  EXPECT_THAT(WhyBad(absl::StrCat("ann view sha256:", std::string(63, '0'), "g")),
              HasSubstr("neither sha256: with 64"));
  EXPECT_THAT(WhyBad("ann view my-token"), HasSubstr("nor cert"));
  EXPECT_THAT(WhyBad("ann view cert\nann admin cert"), HasSubstr("line 2: user \"ann\" has two"));
  EXPECT_THAT(WhyBad(Line("ann", "view", "t") + Line("bob", "view", "t")),
              HasSubstr("line 2: another line has the same token"));
  EXPECT_THAT(WhyBad(absl::StrCat(std::string(129, 'x'), " view cert")), HasSubstr("a name has"));
  EXPECT_THAT(WhyBad("\x01 view cert"), HasSubstr("a name has"));
}

TEST(AttemptTokensTest, Token_ProvesItsGroupOnly) {
  const AttemptTokens tokens(std::string(32, 'k')), others(std::string(32, 'l'));
  const std::string token = tokens.Of("mnist-3.1");
  EXPECT_EQ(tokens.Of("mnist-3.1"), token);
  EXPECT_TRUE(AttemptTokens::LooksLikeOne(token));
  EXPECT_EQ(tokens.GroupOf(token), "mnist-3.1");
  EXPECT_EQ(others.GroupOf(token), "");
  for (size_t i = 0; i < token.size(); ++i) {
    std::string forged = token;
    forged[i] = static_cast<char>(forged[i] ^ 1);
    EXPECT_EQ(tokens.GroupOf(forged), "") << i;
    EXPECT_EQ(tokens.GroupOf(token.substr(0, i)), "") << i;
  }
  EXPECT_EQ(tokens.GroupOf(token + "0"), "");
  EXPECT_EQ(tokens.GroupOf("attempt.."), "");
  EXPECT_EQ(tokens.GroupOf(tokens.Of("")), "");
}

TEST(AttemptTokensTest, Key_IsMadeOnceAndKept) {
  const TestFolder folder;
  const std::string path = folder.Path("attempts.key");
  const std::string token = AttemptTokens::Open(path)->Of("a-1.1");
  EXPECT_EQ(AttemptTokens::Open(path)->GroupOf(token), "a-1.1");
  struct stat info;
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(AttemptTokens::Open("")->GroupOf(token), "");
  EXPECT_NE(AttemptTokens::Open("")->Of("a-1.1"), AttemptTokens::Open("")->Of("a-1.1"));
  ASSERT_EQ(chmod(path.c_str(), 0660), 0);
  EXPECT_EQ(AttemptTokens::Open(path)->GroupOf(token), "a-1.1");
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  ASSERT_TRUE(WriteSecretFile(path, "half a ke").ok());
  const auto damaged = AttemptTokens::Open(path);
  EXPECT_TRUE(absl::IsDataLoss(damaged.status()));
  EXPECT_THAT(std::string(damaged.status().message()), HasSubstr(path));
}

class CallersTest : public ::testing::Test {
 protected:
  void Users(const std::string& text) { ASSERT_TRUE(WriteSecretFile(file_, text).ok()); }
  void Create(const std::string& token, bool users) {
    auto callers = Callers::Create({.token = token,
                                    .users_file = users ? file_ : "",
                                    .attempts = &attempts_,
                                    .clock = &clock_});
    ASSERT_TRUE(callers.ok()) << callers.status();
    callers_ = *std::move(callers);
  }
  absl::StatusOr<std::shared_ptr<const Identity>> Identify(const std::string& token,
                                                           const std::string& certificate = "") {
    const std::string value = absl::StrCat("Bearer ", token);
    Metadata metadata;
    if (!token.empty()) metadata.emplace("authorization", value);
    return callers_->Identify(metadata, certificate);
  }
  // "name role", or the reason of the refusal.
  std::string Who(const std::string& token, const std::string& certificate = "") {
    const auto who = Identify(token, certificate);
    if (!who.ok()) {
      return v1::ErrorReason_Name(rpc::GetDetail(who.status())->reason());
    }
    return absl::StrCat((*who)->name, " ", RoleName((*who)->role), (*who)->group);
  }

  const TestFolder folder_;
  const std::string file_ = folder_.Path("users");
  FakeClock clock_;
  AttemptTokens attempts_{std::string(32, 'k')};
  std::unique_ptr<Callers> callers_;
};

TEST_F(CallersTest, NeitherTokenNorUsers_WhomTheTransportLetsInIsAnAdmin) {
  Create("", false);
  EXPECT_EQ(Who(""), " admin");
  EXPECT_EQ(Who("", "ann"), "ann admin");
  EXPECT_EQ(Who("", "ann\xe9"), "ann\\xe9 admin");  // the owner of a job is named in messages
  EXPECT_EQ(Who("any"), " admin");
}

TEST_F(CallersTest, SharedToken_IsAnAdmins) {
  Create("the token", false);
  EXPECT_EQ(Who("the token"), " admin");
  EXPECT_EQ(Who("another"), "ERROR_REASON_BAD_TOKEN");
  EXPECT_EQ(Who(""), "ERROR_REASON_BAD_TOKEN");
  EXPECT_EQ(Who("", "ann"), "ERROR_REASON_BAD_TOKEN");  // both are needed
}

TEST_F(CallersTest, Users_AreKnownByTokenOrCertificate) {
  Users(Line("ann", "submit", "ann's") + "bob view cert\n");
  Create("", true);
  EXPECT_EQ(Who("ann's"), "ann submit");
  EXPECT_EQ(Who("", "bob"), "bob view");
  EXPECT_EQ(Who("ann's", "bob"), "ann submit");
  EXPECT_EQ(Who("wrong", "bob"), "ERROR_REASON_BAD_TOKEN");
  EXPECT_EQ(Who("", "eve"), "ERROR_REASON_SCOPE");
  EXPECT_EQ(Who(""), "ERROR_REASON_BAD_TOKEN");
  Create("the token", true);
  EXPECT_EQ(Who("the token"), " admin");
  EXPECT_EQ(Who("ann's"), "ann submit");
  EXPECT_EQ(Who("", "bob"), "bob view");
  EXPECT_EQ(Who(""), "ERROR_REASON_BAD_TOKEN");
}

TEST_F(CallersTest, TokenOfAnAttempt_GivesItsScopeWhateverElseWouldBeAllowed) {
  Create("", false);
  EXPECT_EQ(Who(attempts_.Of("a-1.2")), " attempta-1.2");
  EXPECT_EQ(Who(attempts_.Of("a-1.2"), "ann"), " attempta-1.2");
  // Such a token does not count as none, with which everything would be allowed here.
  EXPECT_EQ(Who(AttemptTokens(std::string(32, 'l')).Of("a-1.2")), "ERROR_REASON_BAD_TOKEN");
  Users("bob view cert\n");
  Create("the token", true);
  EXPECT_EQ(Who(attempts_.Of("a-1.2")), " attempta-1.2");
  EXPECT_EQ(Who("attempt.a-1.2."), "ERROR_REASON_BAD_TOKEN");
}

TEST_F(CallersTest, ChangedFile_IsReadAgain) {
  Users(Line("ann", "submit", "ann's"));
  Create("", true);
  EXPECT_EQ(Who("ann's"), "ann submit");
  Users(Line("ann", "view", "ann's") + Line("bob", "view", "bob's"));
  clock_.Advance(Callers::kLook);
  EXPECT_EQ(Who("bob's"), "bob view");
  EXPECT_EQ(Who("ann's"), "ann view");
}

TEST_F(CallersTest, FileThatBecomesBad_LeavesTheUsersAsTheyWere) {
  Users(Line("ann", "submit", "ann's"));
  Create("", true);
  Users("nonsense\n");
  clock_.Advance(Callers::kLook);
  EXPECT_EQ(Who("ann's"), "ann submit");
  ASSERT_EQ(unlink(file_.c_str()), 0);
  clock_.Advance(Callers::kLook);
  EXPECT_EQ(Who("ann's"), "ann submit");
  Users(Line("bob", "view", "bob's"));
  clock_.Advance(Callers::kLook);
  EXPECT_EQ(Who("ann's"), "ERROR_REASON_BAD_TOKEN");
  EXPECT_EQ(Who("bob's"), "bob view");
}

TEST_F(CallersTest, BadFileAtTheStart_IsAnError) {
  Users("ann submit");
  EXPECT_TRUE(absl::IsInvalidArgument(Callers::Create({.users_file = file_}).status()));
  ASSERT_EQ(chmod(file_.c_str(), 0644), 0);
  EXPECT_TRUE(absl::IsPermissionDenied(Callers::Create({.users_file = file_}).status()));
  EXPECT_TRUE(absl::IsNotFound(Callers::Create({.users_file = folder_.Path("none")}).status()));
}

}  // namespace
}  // namespace muster::coordinator
