#include "base/flags/service_settings.h"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// A service with one setting of each kind.
class ServiceSettingsTest : public ::testing::Test {
 protected:
  ServiceSettingsTest() { MakeApp(); }
  // An app reads its arguments once.
  void MakeApp() {
    app_ = std::make_unique<CLI::App>("A server.", "server");
    labels_.clear();
    app_->add_option("--listen", listen_, "address")->capture_default_str();
    app_->add_option("--data_dir", data_dir_, "folder");
    app_->add_option("--lease", lease_, "seconds")
        ->capture_default_str()
        ->check(CLI::Range(0.1, 100.0));
    app_->add_flag("--insecure", insecure_, "no checks");
    app_->add_option("--label", labels_, "KEY=VALUE");
    app_->add_option("--token_file", token_file_, "file")->envname("MUSTER_TOKEN_FILE");
    app_->add_flag("--version", version_, "print the version");
  }
  absl::StatusOr<std::optional<std::string>> Parse(std::vector<std::string> words) {
    return ServiceSettings(app_.get(), {.program = "server",
                                        .prefix = "SERVER_",
                                        .actions = {"version"},
                                        .shared = {{"data_dir", "MUSTER_DATA_DIR"}},
                                        .variables = variables_})
        .Parse(std::move(words));
  }
  // Expects that nothing is printed and nothing is wrong.
  void Read(std::vector<std::string> words) {
    const auto text = Parse(std::move(words));
    ASSERT_TRUE(text.ok()) << text.status();
    EXPECT_FALSE(text->has_value());
  }
  std::string Error(const std::string& config) {
    MakeApp();
    return std::string(Parse({"--config", File(config)}).status().message());
  }
  std::string File(const std::string& text) {
    EXPECT_TRUE(WriteFileAtomically(folder_.Path("c.yaml"), text).ok());
    return folder_.Path("c.yaml");
  }

  const TestFolder folder_;
  std::unique_ptr<CLI::App> app_;
  std::map<std::string, std::string> variables_;
  std::string listen_ = "127.0.0.1:0", data_dir_, token_file_;
  double lease_ = 6;
  bool insecure_ = false, version_ = false;
  std::vector<std::string> labels_;
};

// That variable may be set for other programs.
TEST_F(ServiceSettingsTest, VariableOfOtherPrograms_CountsWhereNothingElseSaysIt) {
  variables_ = {{"MUSTER_DATA_DIR", "theirs"}};
  EXPECT_THAT(**Parse({"--print_config"}), HasSubstr("# MUSTER_DATA_DIR\n"));
  EXPECT_EQ(data_dir_, "theirs");
  MakeApp();
  Read({"--config", File("data_dir: file\n")});
  EXPECT_EQ(data_dir_, "file");
  variables_["SERVER_DATA_DIR"] = "own";
  MakeApp();
  EXPECT_THAT(**Parse({"--print_config", "--config", File("data_dir: file\n")}),
              HasSubstr("# SERVER_DATA_DIR\n"));
  EXPECT_EQ(data_dir_, "own");
  MakeApp();
  EXPECT_THAT(**Parse({"--help"}), AllOf(HasSubstr("SERVER_DATA_DIR"),
                                         ::testing::ContainsRegex("or[ \n]+MUSTER_DATA_DIR")));
}

TEST_F(ServiceSettingsTest, Flag_ComesBeforeVariable_BeforeFile_BeforeDefault) {
  variables_ = {{"SERVER_LISTEN", "variable"}, {"SERVER_DATA_DIR", "variable"}};
  Read({"--config", File("listen: file\ndata_dir: file\nlease: 2.5\n"), "--listen", "flag"});
  EXPECT_EQ(listen_, "flag");
  EXPECT_EQ(data_dir_, "variable");
  EXPECT_EQ(lease_, 2.5);
  EXPECT_FALSE(insecure_);
}

TEST_F(ServiceSettingsTest, EverySource_HasEveryKind) {
  variables_ = {{"MUSTER_TOKEN_FILE", "t"}, {"SERVER_LABEL", "a=1,b=2"}, {"SERVER_INSECURE", "on"}};
  Read({});
  EXPECT_EQ(token_file_, "t");
  EXPECT_THAT(labels_, ElementsAre("a=1", "b=2"));
  EXPECT_TRUE(insecure_);
}

TEST_F(ServiceSettingsTest, File_HasListsAndWordsForYesAndNo) {
  Read({"--config", File("label: [a=1, 'b=2,3']\ninsecure: yes\ndata_dir:\n")});
  EXPECT_THAT(labels_, ElementsAre("a=1", "b=2,3"));
  EXPECT_TRUE(insecure_);
  EXPECT_EQ(data_dir_, "");
}

TEST_F(ServiceSettingsTest, NoInAFile_IsNo_AndAFlagWinsOverIt) {
  Read({"--config", File("insecure: no\n"), "--insecure"});
  EXPECT_TRUE(insecure_);
}

TEST_F(ServiceSettingsTest, Variable_NamesTheFile) {
  variables_ = {{"SERVER_CONFIG", File("lease: 3\n")}};
  Read({});
  EXPECT_EQ(lease_, 3);
}

TEST_F(ServiceSettingsTest, Print_ShowsWhereEachComesFrom_AsAConfigFile) {
  variables_ = {{"SERVER_DATA_DIR", "/data"}};
  const std::string file = File("lease: 3\nlabel: [x=y]\n");
  const auto text = Parse({"--config", file, "--insecure", "--print_config"});
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_THAT(**text,
              AllOf(HasSubstr("listen: \"127.0.0.1:0\"  # default\n"),
                    HasSubstr("data_dir: \"/data\"      # SERVER_DATA_DIR\n"),
                    HasSubstr("lease: 3               # " + file + ":1\n"),
                    HasSubstr("insecure: true         # --insecure\n"),
                    HasSubstr("label: [\"x=y\"]         # " + file + ":2\n"),
                    HasSubstr("# token_file:          # not set\n"), Not(HasSubstr("version"))));
  // The printed config can be read again.
  CLI::App again("A server.", "server");
  std::string listen, data_dir, token_file;
  double lease = 0;
  bool insecure = false;
  std::vector<std::string> labels;
  again.add_option("--listen", listen);
  again.add_option("--data_dir", data_dir);
  again.add_option("--lease", lease);
  again.add_flag("--insecure", insecure);
  again.add_option("--label", labels);
  again.add_option("--token_file", token_file);
  ASSERT_TRUE(ServiceSettings(&again, {.program = "server", .prefix = "S_"})
                  .Parse({"--config", File(**text)})
                  .ok());
  EXPECT_EQ(data_dir, "/data");
  EXPECT_EQ(lease, 3);
  EXPECT_TRUE(insecure);
  EXPECT_THAT(labels, ElementsAre("x=y"));
  EXPECT_THAT(token_file, IsEmpty());
}

TEST_F(ServiceSettingsTest, UnknownKey_IsNamedWithItsLineAndTheNearest) {
  EXPECT_THAT(Error("lease: 3\nlisen: x\n"),
              AllOf(HasSubstr("c.yaml:2: unknown key lisen; did you mean listen?"),
                    HasSubstr("server --print_config shows all keys")));
  EXPECT_THAT(Error("version: true\n"), HasSubstr("c.yaml:1: unknown key version"));
}

TEST_F(ServiceSettingsTest, BadValue_IsNamedWithItsSource) {
  EXPECT_THAT(Error("\nlease: 1000\n"), AllOf(HasSubstr("c.yaml:2: lease: Value 1000 not in range"),
                                              Not(HasSubstr("--lease"))));
  EXPECT_THAT(Error("insecure: perhaps\n"),
              HasSubstr("c.yaml:1: insecure: perhaps is neither true nor false"));
  EXPECT_THAT(Error("listen: [a, b]\n"), HasSubstr("c.yaml:1: listen must be one value"));
  EXPECT_THAT(Error("label: {a: 1}\n"),
              HasSubstr("c.yaml:1: label must be one value, or a list of them"));
  EXPECT_THAT(Error("- a\n"), HasSubstr("must be a list of KEY: VALUE"));
  EXPECT_THAT(Error("a: b: c\n"), HasSubstr("c.yaml:1:"));
  variables_ = {{"SERVER_LEASE", "soon"}};
  MakeApp();
  EXPECT_THAT(Parse({}).status().message(), HasSubstr("SERVER_LEASE: lease: "));
}

TEST_F(ServiceSettingsTest, FileThatIsNotThere_IsNamedWithWhoNamesIt) {
  const absl::Status status = Parse({"--config", "/no/such.yaml"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), "config file /no/such.yaml (from --config) does not exist");
}

TEST_F(ServiceSettingsTest, RequiredSetting_ComesFromAnySource) {
  app_->get_option("--data_dir")->required();
  EXPECT_THAT(Parse({}).status().message(),
              HasSubstr("data_dir is required: give --data_dir, SERVER_DATA_DIR or a key of"));
}

TEST_F(ServiceSettingsTest, RequiredSetting_IsTakenFromTheFile) {
  app_->get_option("--data_dir")->required();
  Read({"--config", File("data_dir: /d\n")});
  EXPECT_EQ(data_dir_, "/d");
}

TEST_F(ServiceSettingsTest, Help_NamesTheVariables) {
  app_->get_option("--data_dir")->required();
  const auto text = Parse({"--help"});
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_THAT(**text, AllOf(HasSubstr("(Env:SERVER_LISTEN)"), HasSubstr("(Env:MUSTER_TOKEN_FILE)"),
                            HasSubstr("REQUIRED"), HasSubstr("--print_config")));
}

// Neither is the next word a value, nor any number a yes or a no.
TEST_F(ServiceSettingsTest, FlagsThatSayNothing_AreNamed) {
  for (const char* const word : {"--data_dir=", "--insecure=-7x", "--insecure=2", "--insecure="}) {
    MakeApp();
    const absl::Status status = Parse({word, "--listen", "here"}).status();
    const std::string name = std::string(word).substr(0, std::string(word).find('='));
    EXPECT_THAT(std::string(status.message()), ::testing::StartsWith(name + ": ")) << word;
  }
  MakeApp();
  Read({"--insecure=no", "--label=A=", "--listen", "here"});
  EXPECT_FALSE(insecure_);
  EXPECT_EQ(labels_, std::vector<std::string>({"A="}));
}

TEST_F(ServiceSettingsTest, UnknownFlag_IsRefused) {
  EXPECT_THAT(Parse({"--lisen", "x"}).status().message(),
              AllOf(HasSubstr("--lisen"), HasSubstr("see server --help")));
}

}  // namespace
}  // namespace muster
