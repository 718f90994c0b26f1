#include "client/cli/token_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/exit_code.h"
#include "base/secret_file.h"
#include "base/signature.h"
#include "base/test_folder.h"
#include "rpc/token.h"

namespace muster::client {
namespace {

using ::testing::HasSubstr;

class TokenCommandTest : public ::testing::Test {
 protected:
  int Run(const std::vector<std::string>& args) {
    out_.str("");
    err_.str("");
    return RunTokenCommand(args, {{}, out_, err_});
  }

  const TestFolder folder_;
  const std::string file_ = folder_.Path("ann.token");
  std::ostringstream out_, err_;
};

TEST_F(TokenCommandTest, Token_IsInAClosedFile_AndItsHashInTheLine) {
  ASSERT_EQ(Run({"ann", "submit", "--out", file_}), kExitOk) << err_.str();
  const auto token = rpc::ReadToken(file_, "token_file");
  ASSERT_TRUE(token.ok()) << token.status();
  EXPECT_EQ(token->size(), 64u);
  EXPECT_EQ(out_.str(),
            absl::StrCat("ann submit sha256:", absl::BytesToHexString(Sha256(*token)), "\n"));
  EXPECT_EQ(out_.str().find(*token), std::string::npos);
  // A token that is in use is not lost when the command is repeated.
  EXPECT_EQ(Run({"ann", "submit", "--out", file_}), kExitConflict);
  EXPECT_THAT(err_.str(), HasSubstr("already exists"));
  EXPECT_EQ(*rpc::ReadToken(file_, "token_file"), *token);
}

TEST_F(TokenCommandTest, BadInput_IsNamed) {
  EXPECT_EQ(Run({"ann"}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("NAME ROLE"));
  EXPECT_EQ(Run({"ann", "submt", "--out", file_}), kExitUsage);
  EXPECT_THAT(err_.str(), HasSubstr("submit"));
  for (const char* name : {"", "a b", "a#b", "a\n"}) {
    EXPECT_EQ(Run({name, "view", "--out", file_}), kExitUsage) << name;
  }
  EXPECT_EQ(Run({"ann", "view", "--out", "/no/such/folder/token"}), kExitNotFound);
  EXPECT_THAT(err_.str(), HasSubstr("/no/such/folder/token"));
}

}  // namespace
}  // namespace muster::client
