#include "client/cli/token_command.h"

#include <sys/stat.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/exit_code.h"
#include "base/secret_file.h"
#include "base/signature.h"
#include "base/suggest.h"
#include "rpc/token.h"

namespace muster::client {
namespace {

// The same as in docs/security.md.
const std::vector<std::string>& Roles() {
  static const auto& roles = *new std::vector<std::string>{"view", "submit", "node", "admin"};
  return roles;
}

absl::Status CheckName(const std::string& name) {
  const bool good = !name.empty() && name.size() <= 128 && name.find('#') == std::string::npos &&
                    std::all_of(name.begin(), name.end(), [](char c) {
                      return absl::ascii_isgraph(static_cast<unsigned char>(c));
                    });
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "a user's name has 1 to 128 printable characters, no space and no '#'");
}

}  // namespace

int RunTokenCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const CommandSpec spec = {
      .name = "muster token",
      .summary = "Makes a user's token, and prints its line for the coordinator's users file.",
      .usage = "NAME ROLE [OPTIONS]",
      .details =
          "Roles: view, submit, node, admin. Add the line to the file of muster-coordinator "
          "--users_file, which\nhas only the token's hash; give the token's file to the user, who "
          "names it with MUSTER_TOKEN_FILE or\n--token_file.\n\nExit codes: 0 done; 2 wrong "
          "options; 3 no such folder; 4 the file exists already.",
      .options = {{.name = "out",
                   .value_name = "FILE",
                   .help = "File for the token, which only you can read (default NAME.token)"}},
      .max_words = 2};
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  if (line.words.size() != 2) {
    return Fail(spec, context,
                absl::InvalidArgumentError("write muster token NAME ROLE, such as muster token "
                                           "ann submit"),
                kExitUsage);
  }
  const std::string &name = line.words[0], &role = line.words[1];
  if (const absl::Status good = CheckName(name); !good.ok()) {
    return Fail(spec, context, good, kExitUsage);
  }
  if (std::find(Roles().begin(), Roles().end(), role) == Roles().end()) {
    return Fail(
        spec, context,
        absl::InvalidArgumentError(absl::StrCat("no role ", role, DidYouMean(role, Roles()),
                                                "; roles are ", absl::StrJoin(Roles(), ", "))),
        kExitUsage);
  }
  const std::string path = line.Has("out") ? line.Get("out") : absl::StrCat(name, ".token");
  struct stat info;
  absl::Status status;
  if (lstat(path.c_str(), &info) == 0) {
    status = absl::AlreadyExistsError(
        absl::StrCat(path, " already exists: remove it, or choose another --out"));
  }
  const std::string token = rpc::NewToken();
  if (status.ok()) status = WriteSecretFile(path, absl::StrCat(token, "\n"));
  if (!status.ok()) return FailCall(spec, context, status);
  context.err << "muster token: wrote " << path << "\n";
  context.out << name << " " << role << " sha256:" << absl::BytesToHexString(Sha256(token)) << "\n";
  return kExitOk;
}

}  // namespace muster::client
