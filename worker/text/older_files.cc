#include "worker/text/older_files.h"

#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/json.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/text/sentence_pieces.h"
#include "worker/text/unicode.h"

namespace muster::text {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

constexpr size_t kMaxVocabularyBytes = size_t{256} << 20;

constexpr char kQwen2Words[] =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|)"
    R"(\s*[\r\n]+|\s+(?!\S)|\s+)";

template <typename AnyJson>
std::string TextOf(const AnyJson& json, const char* name) {
  const auto found = json.find(name);  // end() if it is not an object
  return found != json.end() && found->is_string() ? found->template get<std::string>() : "";
}

// Returns the class without "Fast", with which some names end.
std::string ClassOf(const OlderFiles& files) {
  const std::string model = TextOf(files.config, "model_type");
  // Folders of the Hub name wrong classes, which transformers ignores.
  if (model == "qwen2") return "Qwen2Tokenizer";
  std::string name = TextOf(files.beside.tokenizer_config, "tokenizer_class");
  if (name.empty()) name = TextOf(files.config, "tokenizer_class");
  if (!name.empty()) return std::string(absl::StripSuffix(name, "Fast"));
  return model == "gpt2" ? "GPT2Tokenizer" : model == "bert" ? "BertTokenizer" : "";
}

// Prepends the path of a file to an error in its contents.
absl::Status InFile(const std::string& path, const absl::Status& status) {
  if (!absl::IsInvalidArgument(status)) return status;
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", status.message()));
}

std::vector<absl::string_view> LinesOf(absl::string_view text) {
  std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
  if (lines.back().empty()) lines.pop_back();
  for (absl::string_view& line : lines) line = absl::StripSuffix(line, "\r");
  return lines;
}

absl::string_view WithoutBlanksAtTheEnd(absl::string_view text) {
  for (size_t end = text.size(); end > 0; text = text.substr(0, end)) {
    if (!IsWhitespace(PreviousCharacter(text, end))) break;
  }
  return text;
}

class Maker {
 public:
  Maker(const OlderFiles& files, std::string class_name)
      : files_(files), class_name_(std::move(class_name)) {
    made_.tokenizer_config = files.beside.tokenizer_config.is_object()
                                 ? files.beside.tokenizer_config
                                 : OrderedJson::object();
    made_.tokenizer = {{"version", "1.0"}, {"added_tokens", Json::array()}};
  }

  absl::StatusOr<OlderTokenizer> Make() {
    if (class_name_ == "BertTokenizer") {
      MUSTER_RETURN_IF_ERROR(MakeBert());
    } else if (class_name_ == "LlamaTokenizer") {
      MUSTER_RETURN_IF_ERROR(MakeLlama());
    } else {
      MUSTER_RETURN_IF_ERROR(MakeByteLevel());
    }
    return std::move(made_);
  }

 private:
  std::string PathOf(absl::string_view file) const {
    return absl::StrCat(files_.beside.folder, "/", file);
  }

  absl::StatusOr<bool> Flag(const char* name, bool if_absent) const {
    const auto found = made_.tokenizer_config.find(name);
    if (found == made_.tokenizer_config.end() || found->is_null()) return if_absent;
    if (found->is_boolean()) return found->get<bool>();
    return absl::InvalidArgumentError(
        absl::StrCat(PathOf("tokenizer_config.json"), ": ", name, " must be true or false"));
  }

  void DefaultRole(const char* name, const char* token) {
    if (!made_.tokenizer_config.contains(name)) made_.tokenizer_config[name] = token;
  }

  // Reads what the other files say about tokens, after the class has set its defaults.
  absl::Status ReadTokens() {
    FolderFiles beside = files_.beside;
    beside.tokenizer_config = made_.tokenizer_config;
    beside.without_flags = made_.without_flags = class_name_ == "Qwen2Tokenizer";
    MUSTER_ASSIGN_OR_RETURN(tokens_, TokensOfFolder(beside));
    return absl::OkStatus();
  }

  // Returns the token of a role; empty if there is none.
  std::string Role(const char* name) const {
    const auto role = tokens_.roles.find(name);
    return role == tokens_.roles.end() ? "" : role->second;
  }

  absl::Status AddVocabulary(const Json& vocabulary, absl::string_view file) {
    for (const auto& [token, id] : vocabulary.items()) {
      if (id.is_number_integer()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(PathOf(file), ": the id of \"", Printable(token), "\" is no number"));
    }
    made_.tokenizer["model"]["vocab"] = vocabulary;
    return absl::OkStatus();
  }

  // Returns the model's id, or the one that AddedTokens gives the token.
  std::optional<int64_t> IdOf(const std::string& token) const {
    const Json& vocabulary = made_.tokenizer["model"]["vocab"];
    if (vocabulary.contains(token)) return vocabulary[token].get<int64_t>();
    auto id = static_cast<int64_t>(vocabulary.size());
    absl::flat_hash_set<absl::string_view> before;
    for (const AddedToken& added : tokens_.added) {
      // AddedTokens gives no id to an empty token, a model's token, or a repeated one.
      if (added.content.empty() || vocabulary.contains(added.content) ||
          !before.insert(added.content).second) {
        continue;
      }
      if (added.content == token) return id;
      ++id;
    }
    return std::nullopt;
  }

  // As in transformers, with the text and the id of a role without a token.
  absl::StatusOr<Json> BertTemplateToken(const char* role, int type, Json& declared) const {
    if (!Role(role).empty()) return TemplateToken(role, type, declared);
    const int64_t id = absl::string_view(role) == "cls_token" ? 2 : 3;
    declared["None"] = {{"id", "None"}, {"ids", {id}}, {"tokens", {"None"}}};
    return Json{{"SpecialToken", {{"id", "None"}, {"type_id", type}}}};
  }

  // Returns the entry of a template for the token of a role, which it also declares.
  absl::StatusOr<Json> TemplateToken(const char* role, int type, Json& declared) const {
    const std::string token = Role(role);
    const std::optional<int64_t> id = IdOf(token);
    if (!id.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(PathOf("tokenizer_config.json"), ": ", role,
                                                     " is none, and is to be put around a text"));
    }
    declared[token] = {{"id", token}, {"ids", {*id}}, {"tokens", {token}}};
    return Json{{"SpecialToken", {{"id", token}, {"type_id", type}}}};
  }

  static Json Text(const char* id, int type) {
    return {{"Sequence", {{"id", id}, {"type_id", type}}}};
  }

  absl::Status MakeBert() {
    if (!files_.vocab_txt.has_value()) return NotThere("vocab.txt");
    DefaultRole("unk_token", "[UNK]");
    DefaultRole("sep_token", "[SEP]");
    DefaultRole("pad_token", "[PAD]");
    DefaultRole("cls_token", "[CLS]");
    DefaultRole("mask_token", "[MASK]");
    MUSTER_RETURN_IF_ERROR(ReadTokens());
    Json vocabulary = Json::object();
    int64_t id = 0;
    for (const absl::string_view line : LinesOf(*files_.vocab_txt)) {
      if (!IsValidUtf8(line)) {
        return absl::InvalidArgumentError(
            absl::StrCat(PathOf("vocab.txt"), ":", id + 1, ": is not UTF-8"));
      }
      vocabulary[std::string(WithoutBlanksAtTheEnd(line))] = id++;
    }
    made_.tokenizer["model"] = {{"type", "WordPiece"},
                                {"unk_token", Role("unk_token")},
                                {"continuing_subword_prefix", "##"},
                                {"max_input_chars_per_word", 100}};
    MUSTER_RETURN_IF_ERROR(AddVocabulary(vocabulary, "vocab.txt"));
    MUSTER_ASSIGN_OR_RETURN(const bool lowercase, Flag("do_lower_case", true));
    MUSTER_ASSIGN_OR_RETURN(const bool chinese, Flag("tokenize_chinese_chars", true));
    MUSTER_ASSIGN_OR_RETURN(const bool strip, Flag("strip_accents", false));
    const auto given = made_.tokenizer_config.find("strip_accents");
    const bool strips = given != made_.tokenizer_config.end() && !given->is_null();
    made_.tokenizer["normalizer"] = {{"type", "BertNormalizer"},
                                     {"clean_text", true},
                                     {"handle_chinese_chars", chinese},
                                     {"strip_accents", strips ? Json(strip) : Json()},
                                     {"lowercase", lowercase}};
    made_.tokenizer["pre_tokenizer"] = {{"type", "BertPreTokenizer"}};
    made_.tokenizer["decoder"] = {{"type", "WordPiece"}, {"prefix", "##"}, {"cleanup", true}};
    Json declared = Json::object();
    MUSTER_ASSIGN_OR_RETURN(const Json begin, BertTemplateToken("cls_token", 0, declared));
    MUSTER_ASSIGN_OR_RETURN(const Json end, BertTemplateToken("sep_token", 0, declared));
    MUSTER_ASSIGN_OR_RETURN(const Json last, BertTemplateToken("sep_token", 1, declared));
    made_.tokenizer["post_processor"] = {
        {"type", "TemplateProcessing"},
        {"single", Json::array({begin, Text("A", 0), end})},
        {"pair", Json::array({begin, Text("A", 0), end, Text("B", 1), last})},
        {"special_tokens", declared}};
    return absl::OkStatus();
  }

  absl::Status MakeLlama() {
    if (!files_.tokenizer_model.has_value()) return NotThere("tokenizer.model");
    const std::string path = PathOf("tokenizer.model");
    const absl::StatusOr<SentencePieces> parsed = ReadSentencePieces(*files_.tokenizer_model);
    MUSTER_RETURN_IF_ERROR(InFile(path, parsed.status()));
    const SentencePieces& read = *parsed;
    if (read.algorithm != "BPE") {
      return absl::NotFoundError(absl::StrCat("the tokenizer.model of a LlamaTokenizer is of BPE; ",
                                              "this one is of ", read.algorithm));
    }
    DefaultRole("bos_token", "<s>");
    DefaultRole("eos_token", "</s>");
    DefaultRole("unk_token", "<unk>");
    MUSTER_RETURN_IF_ERROR(AddPiecesThatAreCutOut(read.pieces));
    MUSTER_RETURN_IF_ERROR(ReadTokens());
    Json vocabulary = Json::object();
    for (size_t id = 0; id < read.pieces.size(); ++id) vocabulary[read.pieces[id].text] = id;
    const auto merges = MergesOf(read.pieces);
    MUSTER_RETURN_IF_ERROR(InFile(path, merges.status()));
    made_.tokenizer["model"] = {{"type", "BPE"},
                                {"dropout", nullptr},
                                {"unk_token", nullptr},
                                {"continuing_subword_prefix", nullptr},
                                {"end_of_word_suffix", nullptr},
                                {"fuse_unk", true},
                                {"byte_fallback", true},
                                {"merges", Json::array()}};
    for (const auto& [first, second] : *merges) {
      made_.tokenizer["model"]["merges"].push_back(Json::array({first, second}));
    }
    MUSTER_RETURN_IF_ERROR(AddVocabulary(vocabulary, "tokenizer.model"));
    MUSTER_ASSIGN_OR_RETURN(const bool prefix, Flag("add_prefix_space", true));
    MUSTER_ASSIGN_OR_RETURN(const bool legacy, Flag("legacy", false));
    made_.tokenizer["pre_tokenizer"] = {{"type", "Metaspace"},
                                        {"replacement", "▁"},
                                        {"prepend_scheme", !prefix  ? "never"
                                                           : legacy ? "always"
                                                                    : "first"},
                                        {"split", false}};
    Json decoders =
        Json::array({{{"type", "Replace"}, {"pattern", {{"String", "▁"}}}, {"content", " "}},
                     {{"type", "ByteFallback"}},
                     {{"type", "Fuse"}}});
    if (prefix) {
      decoders.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
    }
    made_.tokenizer["decoder"] = {{"type", "Sequence"}, {"decoders", std::move(decoders)}};
    return AddBeginAndEnd();
  }

  // Adds pieces that are cut out as the folder's extra tokens, if it names none.
  absl::Status AddPiecesThatAreCutOut(const std::vector<SentencePiece>& pieces) {
    OrderedJson& config = made_.tokenizer_config;
    OrderedJson given = config;
    const OrderedJson& map = files_.beside.special_tokens_map;
    if (!config.contains("added_tokens_decoder") && map.contains("extra_special_tokens")) {
      given["extra_special_tokens"] = map["extra_special_tokens"];
    }
    for (const char* const name : {"extra_special_tokens", "additional_special_tokens"}) {
      if (!given.contains(name)) continue;
      if (!given[name].is_object()) return absl::OkStatus();
      return absl::NotFoundError(
          absl::StrCat(name, " beside a tokenizer.model is an object, and must be a list"));
    }
    OrderedJson tokens = OrderedJson::array();
    for (const SentencePiece& piece : pieces) {
      if (!piece.is_added) continue;
      tokens.push_back(
          {{"content", piece.text}, {"special", piece.is_control}, {"normalized", false}});
    }
    config["extra_special_tokens"] = std::move(tokens);
    return absl::OkStatus();
  }

  absl::Status MakeByteLevel() {
    const bool is_gpt2 = class_name_ == "GPT2Tokenizer";
    if (!files_.vocab_json.has_value()) return NotThere("vocab.json");
    if (!files_.merges_txt.has_value()) return NotThere("merges.txt");
    DefaultRole("unk_token", "<|endoftext|>");
    DefaultRole("eos_token", "<|endoftext|>");
    DefaultRole(is_gpt2 ? "bos_token" : "pad_token", "<|endoftext|>");
    MUSTER_RETURN_IF_ERROR(ReadTokens());
    MUSTER_ASSIGN_OR_RETURN(
        const Json vocabulary,
        ParseJson(*files_.vocab_json, PathOf("vocab.json"), {.max_bytes = kMaxVocabularyBytes}));
    if (!vocabulary.is_object()) {
      return absl::InvalidArgumentError(
          absl::StrCat(PathOf("vocab.json"), ": must be an object with the id of each token"));
    }
    made_.tokenizer["model"] = {{"type", "BPE"},
                                {"dropout", nullptr},
                                {"unk_token", nullptr},
                                {"continuing_subword_prefix", ""},
                                {"end_of_word_suffix", ""},
                                {"fuse_unk", false},
                                {"byte_fallback", false}};
    MUSTER_RETURN_IF_ERROR(AddVocabulary(vocabulary, "vocab.json"));
    MUSTER_RETURN_IF_ERROR(AddMerges());
    MUSTER_ASSIGN_OR_RETURN(const bool prefix, Flag("add_prefix_space", false));
    Json bytes = {{"type", "ByteLevel"},
                  {"add_prefix_space", prefix},
                  {"trim_offsets", true},
                  {"use_regex", is_gpt2}};
    if (is_gpt2) {
      made_.tokenizer["pre_tokenizer"] = std::move(bytes);
    } else {
      made_.tokenizer["normalizer"] = {{"type", "NFC"}};
      made_.tokenizer["pre_tokenizer"] = {
          {"type", "Sequence"},
          {"pretokenizers", Json::array({{{"type", "Split"},
                                          {"pattern", {{"Regex", kQwen2Words}}},
                                          {"behavior", "Isolated"},
                                          {"invert", false}},
                                         std::move(bytes)})}};
    }
    made_.tokenizer["decoder"] = {{"type", "ByteLevel"},
                                  {"add_prefix_space", true},
                                  {"trim_offsets", true},
                                  {"use_regex", true}};
    return AddBeginAndEnd();
  }

  absl::Status AddMerges() {
    Json merges = Json::array();
    size_t number = 0;
    for (const absl::string_view line : LinesOf(*files_.merges_txt)) {
      ++number;
      if (!IsValidUtf8(line)) {
        return absl::InvalidArgumentError(
            absl::StrCat(PathOf("merges.txt"), ":", number, ": is not UTF-8"));
      }
      if (absl::StartsWith(line, "#version")) continue;
      const std::vector<std::string> parts = absl::StrSplit(line, ' ');
      if (parts.size() != 2) {
        return absl::InvalidArgumentError(
            absl::StrCat(PathOf("merges.txt"), ":", number, ": must be two tokens and a blank"));
      }
      merges.push_back(parts);
    }
    made_.tokenizer["model"]["merges"] = std::move(merges);
    return absl::OkStatus();
  }

  absl::Status AddBeginAndEnd() {
    MUSTER_ASSIGN_OR_RETURN(const bool wants_bos, Flag("add_bos_token", false));
    MUSTER_ASSIGN_OR_RETURN(const bool wants_eos, Flag("add_eos_token", false));
    const bool bos = wants_bos && !Role("bos_token").empty();
    const bool eos = wants_eos && !Role("eos_token").empty();
    Json declared = Json::object(), pair = Json::array(), single;
    for (const int type : {0, 1}) {
      if (bos) {
        MUSTER_ASSIGN_OR_RETURN(const Json begin, TemplateToken("bos_token", type, declared));
        pair.push_back(begin);
      }
      pair.push_back(Text(type == 0 ? "A" : "B", type));
      if (eos) {
        MUSTER_ASSIGN_OR_RETURN(const Json end, TemplateToken("eos_token", type, declared));
        pair.push_back(end);
      }
      if (type == 0) single = pair;
    }
    made_.tokenizer["post_processor"] = {{"type", "TemplateProcessing"},
                                         {"single", single},
                                         {"pair", pair},
                                         {"special_tokens", declared}};
    return absl::OkStatus();
  }

  absl::Status NotThere(const char* file) const {
    return absl::NotFoundError(absl::StrCat("a ", class_name_, " has a ", file));
  }

  const OlderFiles& files_;
  const std::string class_name_;
  OlderTokenizer made_;
  FolderTokens tokens_;
};

}  // namespace

std::vector<std::string> FilesOf(const OlderFiles& files) {
  const std::string name = ClassOf(files);
  if (name == "GPT2Tokenizer" || name == "Qwen2Tokenizer") return {"vocab.json", "merges.txt"};
  if (name == "BertTokenizer") return {"vocab.txt"};
  if (name == "LlamaTokenizer") return {"tokenizer.model"};
  return {};
}

absl::StatusOr<OlderTokenizer> TokenizerOfOlderFiles(const OlderFiles& files) {
  const std::string name = ClassOf(files);
  if (FilesOf(files).empty()) {
    if (!name.empty()) return absl::NotFoundError(absl::StrCat("it is a ", Printable(name)));
    return absl::NotFoundError(
        files.has_tokenizer_model || files.tokenizer_model.has_value()
            ? "no file says of which class it is; for Llama, Mistral and Mixtral it is "
              "\"tokenizer_class\": \"LlamaTokenizer\" in tokenizer_config.json"
            : "no file says of which class it is");
  }
  return Maker(files, name).Make();
}

}  // namespace muster::text
