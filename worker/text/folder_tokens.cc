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

bool AreSame(const AddedToken& a, const AddedToken& b) {
  return a.content == b.content && a.single_word == b.single_word && a.lstrip == b.lstrip &&
         a.rstrip == b.rstrip && a.normalized == b.normalized && a.special == b.special;
}

AddedToken Special(std::string content) {
  AddedToken token;
  token.content = std::move(content);
  token.special = true;
  return token;
}

// A token as a text, or as an object with `content` and flags. `special` if it does not say so.
template <typename AnyJson>
absl::StatusOr<AddedToken> ReadToken(const AnyJson& json, const std::string& path, bool special) {
  if (json.is_string()) return Special(json.template get<std::string>());
  const auto content = json.find("content");  // end() of what is no object
  if (content == json.end() || !content->is_string()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": a token must be a text, or an object with its \"content\""));
  }
  AddedToken token;
  token.content = content->template get<std::string>();
  absl::Status status;
  const auto flag = [&](const char* name, bool if_absent) {
    const auto found = json.find(name);
    if (found == json.end()) return if_absent;
    if (found->is_boolean()) return found->template get<bool>();
    status = absl::InvalidArgumentError(absl::StrCat(path, ".", name, ": must be true or false"));
    return if_absent;
  };
  token.special = flag("special", special);
  token.single_word = flag("single_word", false);
  token.lstrip = flag("lstrip", false);
  token.rstrip = flag("rstrip", false);
  token.normalized = flag("normalized", !token.special);
  MUSTER_RETURN_IF_ERROR(status);
  return token;
}

// Reads the files one after the other.
class Reader {
 public:
  explicit Reader(const FolderFiles& files) : files_(files) {}

  absl::StatusOr<FolderTokens> Read() {
    ReadFile();
    const Json& config = files_.tokenizer_config;
    has_decoder_ = config.is_object() && config.contains("added_tokens_decoder");
    if (has_decoder_) MUSTER_RETURN_IF_ERROR(ReadDecoder(config["added_tokens_decoder"]));
    MUSTER_RETURN_IF_ERROR(ReadRoles(config, PathOf("tokenizer_config.json")));
    if (!has_decoder_) {
      MUSTER_RETURN_IF_ERROR(
          ReadRoles(files_.special_tokens_map, PathOf("special_tokens_map.json")));
      MUSTER_RETURN_IF_ERROR(ReadAddedTokens());
    }
    return Result();
  }

 private:
  std::string PathOf(absl::string_view file) const {
    return absl::StrCat(files_.folder, "/", file);
  }

  // What the tokenizer has. Its own reader says what is wrong there.
  void ReadFile() {
    if (!files_.tokenizer.is_object()) return;
    const auto added = files_.tokenizer.find("added_tokens");
    if (added == files_.tokenizer.end() || !added->is_array()) return;
    for (const nlohmann::json& each : *added) {
      const absl::StatusOr<AddedToken> token = ReadToken(each, "", /*special=*/false);
      if (token.ok()) of_file_[token->content] = *token;
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

  absl::Status ReadRoles(const Json& json, const std::string& path) {
    if (!json.is_object()) return absl::OkStatus();
    // The list of the first file that has one, under its newer name if it has both.
    constexpr char kExtra[] = "extra_special_tokens", kOlderExtra[] = "additional_special_tokens";
    for (const auto& [name, value] : json.items()) {
      const std::string field = absl::StrCat(path, ": ", Printable(name));
      if (name == kExtra || name == kOlderExtra) {
        const bool counts = name == kExtra || (!has_extra_ && !json.contains(kExtra));
        if (counts) MUSTER_RETURN_IF_ERROR(ReadExtra(value, field));
        continue;
      }
      const bool standard = IsStandardRole(name);
      if (!standard && !(absl::EndsWith(name, "_token") && value.is_string())) continue;
      MUSTER_RETURN_IF_ERROR(SetRole(name, value, field));
    }
    has_extra_ = has_extra_ || IsList(json, kExtra) || IsList(json, kOlderExtra);
    return absl::OkStatus();
  }

  static bool IsList(const Json& json, const char* name) {
    const auto found = json.find(name);
    return found != json.end() && found->is_array();
  }

  absl::Status SetRole(const std::string& name, const Json& value, const std::string& field) {
    if (value.is_null()) {
      roles_.erase(name);
      return absl::OkStatus();
    }
    MUSTER_ASSIGN_OR_RETURN(const AddedToken token, ReadToken(value, field, /*special=*/true));
    roles_.insert_or_assign(name, token);
    if (!IsStandardRole(name)) own_roles_.push_back(name);
    return absl::OkStatus();
  }

  absl::Status ReadExtra(const Json& value, const std::string& field) {
    if (value.is_null()) return absl::OkStatus();
    if (value.is_object()) {
      for (const auto& [name, token] : value.items()) {
        MUSTER_RETURN_IF_ERROR(SetRole(name, token, absl::StrCat(field, ".", Printable(name))));
      }
      return absl::OkStatus();
    }
    if (!value.is_array()) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, ": must be a list of tokens, or an object of them"));
    }
    for (size_t i = 0; i < value.size(); ++i) {
      MUSTER_ASSIGN_OR_RETURN(AddedToken token,
                              ReadToken(value[i], absl::StrCat(field, "[", i, "]"),
                                        /*special=*/true));
      extra_.push_back(std::move(token));
    }
    return absl::OkStatus();
  }

  // {"content": id}, as tokenizers without a tokenizer.json had them.
  absl::Status ReadAddedTokens() {
    const Json& json = files_.added_tokens;
    if (!json.is_object()) return absl::OkStatus();
    absl::flat_hash_set<std::string> special = WithRole();
    for (const AddedToken& token : extra_) special.insert(token.content);
    for (const auto& [content, id] : json.items()) {
      if (!id.is_number_integer()) {
        return absl::InvalidArgumentError(absl::StrCat(
            PathOf("added_tokens.json"), ": the id of \"", Printable(content), "\" is no number"));
      }
      if (of_file_.count(content) != 0) continue;
      AddedToken token = Special(content);
      token.special = special.contains(content);
      token.normalized = !token.special;
      by_id_[id.get<int64_t>()] = std::move(token);
    }
    return absl::OkStatus();
  }

  // The tokens that have a role.
  absl::flat_hash_set<std::string> WithRole() const {
    absl::flat_hash_set<std::string> contents;
    for (const auto& [name, token] : roles_) contents.insert(token.content);
    return contents;
  }

  FolderTokens Result() const {
    FolderTokens result;
    absl::flat_hash_set<std::string> known;
    const absl::flat_hash_set<std::string> with_role = WithRole();
    const auto change = [&](AddedToken token) {
      token.special = token.special || with_role.contains(token.content);
      known.insert(token.content);
      const auto file = of_file_.find(token.content);
      if (file == of_file_.end() || !AreSame(file->second, token)) result.added.push_back(token);
    };
    for (const auto& [content, token] : of_file_) {
      known.insert(content);
      if (!has_decoder_) change(token);
    }
    for (const auto& [id, token] : by_id_) change(token);
    const auto add = [&](const AddedToken& token) {
      if (known.insert(token.content).second) result.added.push_back(token);
    };
    std::vector<std::string> names(std::begin(kRoles), std::end(kRoles));
    names.insert(names.end(), own_roles_.begin(), own_roles_.end());
    for (const std::string& name : names) {
      const auto role = roles_.find(name);
      if (role == roles_.end()) continue;
      result.roles.emplace(name, role->second.content);
      add(role->second);
    }
    for (const AddedToken& token : extra_) add(token);
    return result;
  }

  const FolderFiles& files_;
  std::map<std::string, AddedToken> of_file_;
  std::map<int64_t, AddedToken> by_id_;
  std::map<std::string, AddedToken> roles_;
  std::vector<std::string> own_roles_;  // in their order
  std::vector<AddedToken> extra_;
  bool has_extra_ = false, has_decoder_ = false;
};

}  // namespace

absl::StatusOr<FolderTokens> TokensOfFolder(const FolderFiles& files) {
  return Reader(files).Read();
}

}  // namespace muster::text
