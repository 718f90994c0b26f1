#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "muster/tokenizer.h"
#include "tests/conformance/case_fields.h"
#include "tests/conformance/handlers.h"
#include "tests/testdata/golden.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;

struct Loaded {
  Tokenizer tokenizer;
  std::map<int64_t, Json> added_tokens;
  bool decodes_bytes;
};

// The tokenizers of one run: most cases share a few files. Their paths are relative to the folder
// of the cases, in which the runner runs.
const Loaded& LoadedOf(const Json& in) {
  static auto* const all = new std::map<std::string, Loaded>;
  const std::string path = in.at("tokenizer");
  const auto known = all->find(path);
  if (known != all->end()) return known->second;
  const std::string found = PathExists(path) ? path : testing_support::GoldenPath(path);
  Loaded loaded = {ValueOf(Tokenizer::FromFile(found)), {}, false};
  const Json json = Json::parse(ValueOf(ReadFile(found)));
  for (const Json& token : json.value("added_tokens", Json::array())) {
    loaded.added_tokens.emplace(token.at("id"), token);
  }
  const Json decoder = json.value("decoder", Json());
  loaded.decodes_bytes = decoder.is_object() && decoder.value("type", "") == "ByteLevel";
  return all->emplace(path, std::move(loaded)).first->second;
}

// The cases have no decoded text if the peer's is a mistake (quirks s002 and s003): an added token
// beyond ASCII is read as bytes, or one that is looked for in normalized text goes by that.
bool DecodesAsRecorded(const Loaded& loaded, const Encoding& encoding) {
  for (size_t i = 0; i < encoding.size(); ++i) {
    const auto added = loaded.added_tokens.find(encoding.ids[i]);
    if (added == loaded.added_tokens.end()) continue;
    const std::string content = added->second.at("content");
    const bool ascii = std::all_of(content.begin(), content.end(), [](char c) { return c >= 0; });
    if (loaded.decodes_bytes && !ascii) return false;
    const bool normalized = added->second.at("normalized");
    if (normalized && encoding.tokens[i].find(content) == std::string::npos) return false;
  }
  return true;
}

Json OffsetsOf(const Encoding& encoding) {
  Json offsets = Json::array();
  for (const auto& [begin, end] : encoding.offsets) offsets.push_back({begin, end});
  return offsets;
}

Json EncodeCase(const Loaded& loaded, const Json& in) {
  const Tokenizer& tokenizer = loaded.tokenizer;
  EncodeOptions options;
  options.add_special_tokens = in.at("add_special_tokens");
  const std::string text = in.at("text");
  const bool is_pair = in.contains("pair") && !in.at("pair").is_null();
  const Encoding encoding =
      is_pair ? ValueOf(tokenizer.EncodePair(text, in.at("pair").get<std::string>(), options))
              : ValueOf(tokenizer.Encode(text, options));
  Json out = {{"ids", encoding.ids}, {"offsets", OffsetsOf(encoding)}};
  // For long texts no more is recorded.
  constexpr int64_t kLong = 10'000;
  const auto characters =
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
  if (characters >= kLong) return out;
  out["tokens"] = encoding.tokens;
  const std::string decoded = ValueOf(tokenizer.Decode(encoding.ids, false));
  const std::string decoded_skip = ValueOf(tokenizer.Decode(encoding.ids, true));
  if (DecodesAsRecorded(loaded, encoding)) {
    out["decoded"] = decoded;
    out["decoded_skip"] = decoded_skip;
  }
  if (is_pair) {
    out["type_ids"] = encoding.type_ids;
    out["special_tokens_mask"] = encoding.special_tokens_mask;
  }
  return out;
}

TextSide SideOf(const Json& in) {
  const std::string side = in.at("direction");
  if (side != "left" && side != "right") throw std::invalid_argument("unknown side " + side);
  return side == "left" ? TextSide::kLeft : TextSide::kRight;
}

std::optional<Padding> PaddingOf(const Json& in) {
  if (in.is_null()) return std::nullopt;
  constexpr int64_t kMost = 1 << 20;
  Padding padding;
  padding.direction = SideOf(in);
  if (!in.at("length").is_null()) padding.length = IntOf(in, "length", 0, kMost);
  if (!in.at("pad_to_multiple_of").is_null()) {
    padding.pad_to_multiple_of = IntOf(in, "pad_to_multiple_of", 0, kMost);
  }
  padding.pad_id = IntOf(in, "pad_id");
  padding.pad_type_id = IntOf(in, "pad_type_id");
  padding.pad_token = in.at("pad_token");
  return padding;
}

std::optional<Truncation> TruncationOf(const Json& in) {
  if (in.is_null()) return std::nullopt;
  Truncation truncation;
  truncation.direction = SideOf(in);
  truncation.max_length = IntOf(in, "max_length");
  truncation.stride = IntOf(in, "stride");
  const std::string strategy = in.at("strategy");
  if (strategy == "only_first") {
    truncation.strategy = Truncation::Strategy::kOnlyFirst;
  } else if (strategy == "only_second") {
    truncation.strategy = Truncation::Strategy::kOnlySecond;
  } else if (strategy != "longest_first") {
    throw std::invalid_argument("unknown strategy " + strategy);
  }
  return truncation;
}

Json AnswerOf(const Encoding& encoding) {
  Json overflowing = Json::array();
  for (const Encoding& window : encoding.overflowing) overflowing.push_back(AnswerOf(window));
  return {{"ids", encoding.ids},
          {"type_ids", encoding.type_ids},
          {"attention_mask", encoding.attention_mask},
          {"special_tokens_mask", encoding.special_tokens_mask},
          {"offsets", OffsetsOf(encoding)},
          {"overflowing", overflowing}};
}

Json BatchCase(const Tokenizer& tokenizer, const Json& in) {
  EncodeOptions options;
  options.add_special_tokens = in.at("add_special_tokens");
  options.padding = PaddingOf(in.at("padding"));
  options.truncation = TruncationOf(in.at("truncation"));
  std::vector<TextInput> inputs;
  for (const Json& text : in.at("texts")) {
    if (text.is_array()) {
      inputs.emplace_back(text.at(0).get_ref<const std::string&>(),
                          text.at(1).get_ref<const std::string&>());
    } else {
      inputs.emplace_back(text.get_ref<const std::string&>());
    }
  }
  Json encodings = Json::array();
  for (const Encoding& encoding : ValueOf(tokenizer.EncodeBatch(inputs, options))) {
    encodings.push_back(AnswerOf(encoding));
  }
  return {{"encodings", encodings}};
}

Json InfoCase(const Tokenizer& tokenizer, const Json& in) {
  Json ids = Json::array();
  for (const Json& token : in.at("tokens")) {
    const std::optional<int64_t> id = tokenizer.TokenToId(token.get<std::string>());
    ids.push_back(id.has_value() ? Json(*id) : Json());
  }
  return {{"vocab_size", tokenizer.VocabSize(true)},
          {"vocab_size_without_added", tokenizer.VocabSize(false)},
          {"ids", ids}};
}

Json TokenizerCase(const Json& in) {
  const Loaded& loaded = LoadedOf(in);
  const Tokenizer& tokenizer = loaded.tokenizer;
  const std::string mode = in.at("mode");
  if (mode == "encode") return EncodeCase(loaded, in);
  if (mode == "batch") return BatchCase(tokenizer, in);
  if (mode == "info") return InfoCase(tokenizer, in);
  if (mode != "decode") throw std::invalid_argument("unknown mode " + mode);
  const auto ids = in.at("ids").get<std::vector<int64_t>>();
  return {{"text", ValueOf(tokenizer.Decode(ids, in.at("skip_special_tokens").get<bool>()))}};
}

}  // namespace

std::map<std::string, Handler> TokenizerHandlers() { return {{"hf_tokenizer", TokenizerCase}}; }

}  // namespace muster::conformance
