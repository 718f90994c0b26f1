#include "worker/text/folder_tokens.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "base/text.h"

namespace muster::text {
namespace {

using Json = nlohmann::ordered_json;

// In the order in which transformers adds them.
constexpr const char* kRoles[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                  "pad_token", "cls_token", "mask_token"};

bool IsStandardRole(absl::string_view name) {
  return std::find(std::begin(kRoles), std::end(kRoles), name) != std::end(kRoles);
}

// Returns a text that is equal for tokens of the same content and flags.
std::string KeyOf(const AddedToken& token) {
  return absl::StrCat(token.single_word, token.lstrip, token.rstrip, token.normalized,
                      token.special, token.content);
}

// A token in a file.
struct Token {
  AddedToken token;
  bool says_normalized = false;  // otherwise it follows from `special`
  bool is_text = false;          // not an object with flags
  bool of_map = false;           // from special_tokens_map.json
};

void MakeSpecial(Token& token) {
  token.token.special = true;
  if (!token.says_normalized) token.token.normalized = false;
}

// Reads a token as a text, which is special, or as an object with `content` and flags. `special`:
// the flag if the object lacks it.
template <typename AnyJson>
absl::StatusOr<Token> ReadToken(const AnyJson& json, const std::string& path, bool special) {
  Token token;
  if (json.is_string()) {
    token.token.content = json.template get<std::string>();
    token.token.special = true;
    token.is_text = true;
    return token;
  }
  const auto content = json.find("content");  // end() if it is not an object
  if (content == json.end() || !content->is_string()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": a token must be a text, or an object with its \"content\""));
  }
  token.token.content = content->template get<std::string>();
  absl::Status status;
  const auto flag = [&](const char* name, bool if_absent) {
    const auto found = json.find(name);
    if (found == json.end()) return if_absent;
    if (found->is_boolean()) return found->template get<bool>();
    status = absl::InvalidArgumentError(absl::StrCat(path, ".", name, ": must be true or false"));
    return if_absent;
  };
  token.token.special = flag("special", special);
  token.token.single_word = flag("single_word", false);
  token.token.lstrip = flag("lstrip", false);
  token.token.rstrip = flag("rstrip", false);
  token.token.normalized = flag("normalized", !token.token.special);
  token.says_normalized = json.contains("normalized");
  MUSTER_RETURN_IF_ERROR(status);
  return token;
}

// Tokens by the names of their roles, in the order in which these came first.
class Roles {
 public:
  void Set(const std::string& name, Token token) {
    if (tokens_.insert_or_assign(name, std::move(token)).second) names_.push_back(name);
  }
  // The role keeps its place in the order.
  void Erase(const std::string& name) {
    const auto found = tokens_.find(name);
    if (found != tokens_.end()) found->second.reset();
  }
  // `use` takes a name and a token.
  template <typename Use>
  void ForEach(const Use& use) const {
    for (const std::string& name : names_) {
      if (const std::optional<Token>& token = tokens_.at(name); token.has_value()) {
        use(name, *token);
      }
    }
  }

 private:
  std::map<std::string, std::optional<Token>> tokens_;
  std::vector<std::string> names_;
};

constexpr char kExtra[] = "extra_special_tokens", kOlderExtra[] = "additional_special_tokens";

// Reads the files one after the other.
class Reader {
 public:
  explicit Reader(const FolderFiles& files) : files_(files) {
    for (const char* const name : kRoles) {
      // Set the order, whatever that of the files is.
      roles_.Set(name, Token());
      roles_.Erase(name);
    }
  }

  absl::StatusOr<FolderTokens> Read() {
    ReadFile();
    const Json& config = files_.tokenizer_config;
    has_decoder_ = config.is_object() && config.contains("added_tokens_decoder");
    if (has_decoder_) MUSTER_RETURN_IF_ERROR(ReadDecoder(config["added_tokens_decoder"]));
    MUSTER_RETURN_IF_ERROR(ReadConfig());
    if (!has_decoder_) {
      MUSTER_RETURN_IF_ERROR(ReadMap());
      MUSTER_RETURN_IF_ERROR(ReadAddedTokens());
      MUSTER_RETURN_IF_ERROR(ReadOlderExtraOfMap());
    }
    decided_.ForEach(
        [this](const std::string& name, const Token& token) { roles_.Set(name, token); });
    return Result();
  }

 private:
  std::string PathOf(absl::string_view file) const {
    return absl::StrCat(files_.folder, "/", file);
  }

  // Reads the tokens of tokenizer.json. Its own reader reports errors there.
  void ReadFile() {
    if (!files_.tokenizer.is_object()) return;
    const auto added = files_.tokenizer.find("added_tokens");
    if (added == files_.tokenizer.end() || !added->is_array()) return;
    for (const nlohmann::json& each : *added) {
      const absl::StatusOr<Token> token = ReadToken(each, "", /*special=*/false);
      if (!token.ok()) continue;
      of_file_[token->token.content] = *token;
      if (const auto id = each.find("id"); id != each.end() && id->is_number_integer()) {
        ids_of_file_.insert(id->get<int64_t>());
      }
    }
  }

  absl::Status ReadDecoder(const Json& decoder) {
    const std::string path = PathOf("tokenizer_config.json: added_tokens_decoder");
    if (decoder.is_null()) return absl::OkStatus();
    if (!decoder.is_object()) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": must be an object"));
    }
    for (const auto& [key, value] : decoder.items()) {
      int64_t id = 0;
      if (!absl::SimpleAtoi(key, &id) || !value.is_object()) {
        return absl::InvalidArgumentError(
            absl::StrCat(path, ": \"", Printable(key), "\" must be an id, and have a token"));
      }
      MUSTER_ASSIGN_OR_RETURN(by_id_[id],
                              ReadToken(value, absl::StrCat(path, ".", id), /*special=*/false));
    }
    return absl::OkStatus();
  }

  absl::Status ReadConfig() {
    const Json& config = files_.tokenizer_config;
    if (!config.is_object()) return absl::OkStatus();
    const std::string path = PathOf("tokenizer_config.json: ");
    for (const auto& [name, value] : config.items()) {
      const std::string field = path + Printable(name);
      const auto type = value.find("__type");  // end() if it is not an object
      if (IsStandardRole(name)) {
        MUSTER_RETURN_IF_ERROR(SetRole(name, value, field, roles_));
      } else if (!absl::EndsWith(name, "_token")) {
        continue;
      } else if (value.is_string()) {
        MUSTER_RETURN_IF_ERROR(SetRole(name, value, field, decided_));
      } else if (type != value.end() && *type == "AddedToken") {
        MUSTER_RETURN_IF_ERROR(SetRole(name, value, field, roles_));
      }
    }
    // Use the newer name if there are both.
    for (const char* const name : {kExtra, kOlderExtra}) {
      const auto extra = config.find(name);
      if (extra == config.end()) continue;
      return ReadExtra(*extra, path + name, /*of_map=*/false);
    }
    return absl::OkStatus();
  }

  absl::Status ReadMap() {
    const Json& map = files_.special_tokens_map;
    if (!map.is_object()) return absl::OkStatus();
    const std::string path = PathOf("special_tokens_map.json: ");
    for (const auto& [name, value] : map.items()) {
      const bool own = absl::EndsWith(name, "_token") &&
                       (value.is_string() || value.is_object() || value.is_null());
      if (!own && !IsStandardRole(name)) continue;
      MUSTER_RETURN_IF_ERROR(SetRole(name, value, path + Printable(name), roles_, /*of_map=*/true));
    }
    const auto extra = map.find(kExtra);
    if (extra == map.end()) return absl::OkStatus();
    if (!extra->is_array()) extra_.clear();
    return ReadExtra(*extra, path + kExtra, /*of_map=*/true);
  }

  // Counts only if no other file has extra tokens, and not for what added_tokens.json says.
  absl::Status ReadOlderExtraOfMap() {
    const Json& map = files_.special_tokens_map;
    if (!map.is_object() || says_extra_) return absl::OkStatus();
    const auto extra = map.find(kOlderExtra);
    if (extra == map.end()) return absl::OkStatus();
    return ReadExtra(*extra, PathOf(absl::StrCat("special_tokens_map.json: ", kOlderExtra)),
                     /*of_map=*/true);
  }

  // Null: the role has no token.
  static absl::Status SetRole(const std::string& name, const Json& value, const std::string& field,
                              Roles& roles, bool of_map = false) {
    if (value.is_null()) {
      roles.Erase(name);
      return absl::OkStatus();
    }
    MUSTER_ASSIGN_OR_RETURN(Token token, ReadToken(value, field, of_map));
    token.of_map = of_map;
    roles.Set(name, std::move(token));
    return absl::OkStatus();
  }

  // Reads extra tokens. Those of a list follow the existing ones.
  absl::Status ReadExtra(const Json& value, const std::string& field, bool of_map) {
    says_extra_ = !value.is_object();
    if (value.is_null()) return absl::OkStatus();
    if (value.is_object()) {
      for (const auto& [name, token] : value.items()) {
        MUSTER_RETURN_IF_ERROR(
            SetRole(name, token, absl::StrCat(field, ".", Printable(name)), decided_));
      }
      return absl::OkStatus();
    }
    if (!value.is_array()) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, ": must be a list of tokens, or an object of them"));
    }
    for (size_t i = 0; i < value.size(); ++i) {
      MUSTER_ASSIGN_OR_RETURN(Token token,
                              ReadToken(value[i], absl::StrCat(field, "[", i, "]"), of_map));
      token.of_map = of_map;
      extra_.push_back(std::move(token));
    }
    return absl::OkStatus();
  }

  // Reads {"content": id}, as tokenizers without a tokenizer.json had them.
  absl::Status ReadAddedTokens() {
    const Json& json = files_.added_tokens;
    if (!json.is_object()) return absl::OkStatus();
    absl::flat_hash_set<std::string> special;
    // When transformers looks at them here, objects of tokenizer_config.json are not tokens yet.
    const auto insert = [&special](const Token& token) {
      if (token.is_text || token.of_map) special.insert(token.token.content);
    };
    roles_.ForEach([&insert](const std::string& name, const Token& token) {
      if (IsStandardRole(name)) insert(token);
    });
    for (const Token& token : extra_) insert(token);
    for (const auto& [content, id] : json.items()) {
      if (!id.is_number_integer()) {
        return absl::InvalidArgumentError(absl::StrCat(
            PathOf("added_tokens.json"), ": the id of \"", Printable(content), "\" is no number"));
      }
      // The tokenizer's own token with this id takes precedence.
      if (ids_of_file_.contains(id.get<int64_t>())) continue;
      Token token;
      token.token.content = content;
      token.token.special = special.contains(content);
      token.token.normalized = !token.token.special;
      token.says_normalized = true;
      by_id_[id.get<int64_t>()] = std::move(token);
    }
    return absl::OkStatus();
  }

  FolderTokens Result() const {
    FolderTokens result;
    absl::flat_hash_set<std::string> known, with_role, seen;
    roles_.ForEach([&](const std::string& name, const Token& token) {
      result.roles.emplace(name, token.token.content);
      with_role.insert(token.token.content);
    });
    const auto change = [&](Token token) {
      if (with_role.contains(token.token.content)) MakeSpecial(token);
      known.insert(token.token.content);
      const auto file = of_file_.find(token.token.content);
      if (file == of_file_.end() || KeyOf(file->second.token) != KeyOf(token.token)) {
        result.added.push_back(token.token);
      }
    };
    for (const auto& [content, token] : of_file_) {
      known.insert(content);
      if (!has_decoder_) change(token);
    }
    for (const auto& [id, token] : by_id_) {
      result.ids.emplace_back(token.token.content, id);
      change(token);
    }
    // The last of several with one content and different flags counts.
    const auto add = [&](Token token) {
      if (known.contains(token.token.content)) return;
      if (!seen.insert(absl::StrCat(token.is_text, KeyOf(token.token))).second) return;
      if (with_role.contains(token.token.content)) MakeSpecial(token);
      result.added.push_back(std::move(token.token));
    };
    roles_.ForEach([&add](const std::string&, const Token& token) { add(token); });
    for (const Token& token : extra_) add(token);
    if (!files_.without_flags) return result;
    const auto add_again = [&result](const Token& token) {
      result.added.push_back({.content = token.token.content, .special = true});
    };
    roles_.ForEach([&](const std::string&, const Token& token) { add_again(token); });
    for (const Token& token : extra_) add_again(token);
    return result;
  }

  const FolderFiles& files_;
  std::map<std::string, Token> of_file_;
  absl::flat_hash_set<int64_t> ids_of_file_;
  std::map<int64_t, Token> by_id_;
  Roles roles_;
  // Own roles of tokenizer_config.json that are texts, and those of objects of extra tokens: they
  // take precedence over all others, but come after them.
  Roles decided_;
  std::vector<Token> extra_;
  bool says_extra_ = false, has_decoder_ = false;
};

}  // namespace

absl::StatusOr<FolderTokens> TokensOfFolder(const FolderFiles& files) {
  return Reader(files).Read();
}

}  // namespace muster::text
