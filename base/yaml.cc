#include "base/yaml.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <limits>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/json.h"

namespace muster {
namespace {

using Json = nlohmann::json;

// Leaves the parser, which has no other way to stop.
struct Refusal {
  absl::Status status;
};

enum class NumberKind { kNone, kInteger, kFloat, kTooLarge };

std::string Digits(absl::string_view text) { return absl::StrReplaceAll(text, {{"_", ""}}); }

bool AllOf(absl::string_view text, bool (*accept)(unsigned char)) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [&](char c) { return c == '_' || accept(c); });
}

bool IsBinary(unsigned char c) { return c == '0' || c == '1'; }
bool IsOctal(unsigned char c) { return c >= '0' && c <= '7'; }
bool IsDecimal(unsigned char c) { return absl::ascii_isdigit(c); }
bool IsHexadecimal(unsigned char c) { return absl::ascii_isxdigit(c); }

NumberKind ParseInteger(absl::string_view text, Json* value) {
  const bool negative = absl::StartsWith(text, "-");
  if (negative || absl::StartsWith(text, "+")) text.remove_prefix(1);
  int base = 10;
  if (absl::StartsWith(text, "0b") && AllOf(text.substr(2), IsBinary)) {
    base = 2;
    text.remove_prefix(2);
  } else if (absl::StartsWith(text, "0x") && AllOf(text.substr(2), IsHexadecimal)) {
    base = 16;
    text.remove_prefix(2);
  } else if (text.size() > 1 && text[0] == '0' && AllOf(text, IsOctal)) {
    base = 8;
  } else if (text != "0" && (!AllOf(text, IsDecimal) || text[0] == '0' || text[0] == '_')) {
    return NumberKind::kNone;
  }
  const std::string digits = Digits(text);
  if (digits.empty()) return NumberKind::kNone;
  uint64_t magnitude = 0;
  for (const char c : digits) {
    const int digit = absl::ascii_isdigit(c) ? c - '0' : absl::ascii_tolower(c) - 'a' + 10;
    if (magnitude > (std::numeric_limits<uint64_t>::max() - digit) / base) {
      return NumberKind::kTooLarge;
    }
    magnitude = magnitude * base + digit;
  }
  constexpr uint64_t kLargest = std::numeric_limits<int64_t>::max();
  if (negative) {
    if (magnitude > kLargest + 1) return NumberKind::kTooLarge;
    *value = static_cast<int64_t>(-magnitude);
  } else if (magnitude <= kLargest) {
    *value = static_cast<int64_t>(magnitude);
  } else {
    *value = magnitude;
  }
  return NumberKind::kInteger;
}

NumberKind ParseFloat(absl::string_view text, Json* value) {
  absl::string_view body = text;
  const bool negative = absl::StartsWith(body, "-");
  if (negative || absl::StartsWith(body, "+")) body.remove_prefix(1);
  if (body == ".inf" || body == ".Inf" || body == ".INF") {
    const double infinity = std::numeric_limits<double>::infinity();
    *value = negative ? -infinity : infinity;
    return NumberKind::kFloat;
  }
  if (text == ".nan" || text == ".NaN" || text == ".NAN") {
    *value = std::numeric_limits<double>::quiet_NaN();
    return NumberKind::kFloat;
  }
  const size_t point = body.find('.');
  if (point == absl::string_view::npos) return NumberKind::kNone;
  const absl::string_view whole = body.substr(0, point);
  absl::string_view rest = body.substr(point + 1);
  if (!whole.empty() && (!AllOf(whole, IsDecimal) || whole[0] == '_')) return NumberKind::kNone;
  const size_t e = rest.find_first_of("eE");
  if (e != absl::string_view::npos) {
    const absl::string_view exponent = rest.substr(e + 1);
    if (exponent.size() < 2 || (exponent[0] != '+' && exponent[0] != '-') ||
        !std::all_of(exponent.begin() + 1, exponent.end(), IsDecimal)) {
      return NumberKind::kNone;
    }
    rest = rest.substr(0, e);
  }
  if (!rest.empty() && !AllOf(rest, IsDecimal)) return NumberKind::kNone;
  if (whole.empty() && (rest.empty() || rest[0] == '_')) return NumberKind::kNone;
  double number = 0;
  if (!absl::SimpleAtod(Digits(body), &number)) return NumberKind::kNone;
  *value = negative ? -number : number;
  return NumberKind::kFloat;
}

bool IsOneOf(absl::string_view text, std::initializer_list<absl::string_view> words) {
  for (const absl::string_view word : words) {
    std::string capitalised(word);
    capitalised[0] = absl::ascii_toupper(capitalised[0]);
    if (text == word || text == capitalised || text == absl::AsciiStrToUpper(word)) return true;
  }
  return false;
}

bool ParseBool(absl::string_view text, Json* value) {
  if (IsOneOf(text, {"yes", "on", "true"})) {
    *value = true;
  } else if (IsOneOf(text, {"no", "off", "false"})) {
    *value = false;
  } else {
    return false;
  }
  return true;
}

bool IsNull(absl::string_view text) {
  return text.empty() || text == "~" || IsOneOf(text, {"null"});
}

int CountNodes(const Json& value) {
  int count = 1;
  if (value.is_structured()) {
    for (const Json& part : value) count += CountNodes(part);
  }
  return count;
}

// "~" and "/" have a meaning in JSON pointers.
std::string Escaped(absl::string_view key) {
  return absl::StrReplaceAll(key, {{"~", "~0"}, {"/", "~1"}});
}

class Builder final : public YAML::EventHandler {
 public:
  Builder(absl::string_view source, const YamlLimits& limits) : source_(source), limits_(limits) {}

  YamlDocument TakeDocument() { return std::move(document_); }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    if (AtKey())
      Refuse(mark, "a key of this map is empty or null; quote it if it is meant as text");
    Add(mark, Json(), anchor, /*nodes=*/1);
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    if (AtKey()) Refuse(mark, "a key may not be an alias");
    const auto found = anchors_.find(anchor);
    if (found == anchors_.end()) Refuse(mark, "an alias is inside its own anchor");
    Add(mark, found->second, YAML::NullAnchor, CountNodes(found->second));
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& text) override {
    if (AtKey()) {
      Frame& frame = frames_.back();
      frame.key_mark = mark;
      frame.has_key = true;
      frame.key = text;
      frame.is_merge = tag == "?" && text == "<<";
      if (!frame.is_merge && !frame.names.insert(text).second) {
        Refuse(mark, absl::StrCat("the key \"", Shown(text), "\" occurs twice in this map"));
      }
      return;
    }
    Json value = Resolve(mark, tag, text);
    if (tag == "?" && value.is_number_integer() && value.dump() != text) {
      document_.rewritten[NextPointer()] = text;
    }
    Add(mark, std::move(value), anchor, /*nodes=*/1);
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    Open(mark, tag, "tag:yaml.org,2002:seq", anchor, Json::array());
  }
  void OnSequenceEnd() override { Close(); }

  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    Open(mark, tag, "tag:yaml.org,2002:map", anchor, Json::object());
  }
  void OnMapEnd() override { Close(); }

 private:
  struct Frame {
    Json value;
    YAML::Mark mark;
    YAML::anchor_t anchor;
    std::string pointer;
    // Maps only.
    bool has_key = false;
    bool is_merge = false;
    std::string key;
    YAML::Mark key_mark;
    absl::flat_hash_set<std::string> names;
    std::vector<Json> merges;
  };

  [[noreturn]] void Refuse(const YAML::Mark& mark, absl::string_view why) const {
    throw Refusal{absl::InvalidArgumentError(
        absl::StrCat(source_, ":", mark.line + 1, ":", mark.column + 1, ": ", why))};
  }

  static std::string Shown(absl::string_view text) { return Printable(text); }

  bool AtKey() const {
    return !frames_.empty() && frames_.back().value.is_object() && !frames_.back().has_key;
  }

  Json Resolve(const YAML::Mark& mark, const std::string& tag, const std::string& text) const {
    Json value;
    const bool plain = tag == "?";
    if (tag == "!" || tag == "tag:yaml.org,2002:str") return text;
    const absl::string_view wanted = absl::StartsWith(tag, "tag:yaml.org,2002:")
                                         ? absl::string_view(tag).substr(18)
                                         : absl::string_view();
    if (!plain && wanted != "int" && wanted != "float" && wanted != "bool" && wanted != "null") {
      Refuse(mark, absl::StrCat("the tag ", Shown(tag), " is not supported"));
    }
    if ((plain || wanted == "null") && IsNull(text)) return Json();
    if ((plain || wanted == "bool") && ParseBool(text, &value)) return value;
    if (plain || wanted == "int" || wanted == "float") {
      const NumberKind kind = ParseInteger(text, &value);
      if (kind == NumberKind::kTooLarge) {
        Refuse(mark, absl::StrCat("the number ", Shown(text), " does not fit 64 bits"));
      }
      if (kind == NumberKind::kInteger) {
        return wanted == "float" ? Json(value.get<double>()) : value;
      }
    }
    if ((plain || wanted == "float") && ParseFloat(text, &value) == NumberKind::kFloat)
      return value;
    if (plain) return text;
    Refuse(mark, absl::StrCat("\"", Shown(text), "\" is no ", wanted));
  }

  std::string NextPointer() const {
    if (frames_.empty()) return "";
    const Frame& frame = frames_.back();
    return frame.value.is_object() ? absl::StrCat(frame.pointer, "/", Escaped(frame.key))
                                   : absl::StrCat(frame.pointer, "/", frame.value.size());
  }

  void Open(const YAML::Mark& mark, const std::string& tag, absl::string_view own_tag,
            YAML::anchor_t anchor, Json value) {
    if (AtKey()) Refuse(mark, "a key must be plain text, not a list or a map");
    if (tag != "?" && tag != "!" && tag != own_tag) {
      Refuse(mark, absl::StrCat("the tag ", Shown(tag), " is not supported"));
    }
    if (static_cast<int>(frames_.size()) >= limits_.max_depth) {
      throw Refusal{absl::ResourceExhaustedError(
          absl::StrCat(source_, ":", mark.line + 1, ": nested deeper than the ", limits_.max_depth,
                       " levels allowed"))};
    }
    Frame frame;
    frame.value = std::move(value);
    frame.mark = mark;
    frame.anchor = anchor;
    frame.pointer = NextPointer();
    frames_.push_back(std::move(frame));
  }

  void Close() {
    Frame frame = std::move(frames_.back());
    frames_.pop_back();
    // The map's own keys win over merged ones, earlier merges over later ones.
    for (const Json& merge : frame.merges) {
      for (const auto& [key, value] : merge.items()) {
        if (!frame.value.contains(key)) frame.value[key] = value;
      }
    }
    Add(frame.mark, std::move(frame.value), frame.anchor, /*nodes=*/1);
  }

  void Add(const YAML::Mark& mark, Json value, YAML::anchor_t anchor, int nodes) {
    nodes_ += nodes;
    if (nodes_ > limits_.max_nodes) {
      throw Refusal{absl::ResourceExhaustedError(
          absl::StrCat(source_, ":", mark.line + 1, ": more than the ", limits_.max_nodes,
                       " values allowed, aliases expanded"))};
    }
    if (anchor != YAML::NullAnchor) anchors_[anchor] = value;
    if (frames_.empty()) {
      SetPlace("", mark.line + 1);
      document_.value = std::move(value);
      return;
    }
    Frame& frame = frames_.back();
    if (frame.value.is_array()) {
      SetPlace(NextPointer(), mark.line + 1);
      frame.value.push_back(std::move(value));
      return;
    }
    frame.has_key = false;
    if (!frame.is_merge) {
      SetPlace(NextPointer(), frame.key_mark.line + 1);
      frame.value[frame.key] = std::move(value);
      return;
    }
    if (!value.is_array()) value = Json::array({std::move(value)});
    for (Json& part : value) {
      if (!part.is_object()) Refuse(mark, "only maps can be merged with \"<<\"");
      frame.merges.push_back(std::move(part));
    }
  }

  void SetPlace(const std::string& pointer, int line) {
    document_.lines[pointer] = line;
    document_.order[pointer] = static_cast<int>(document_.order.size());
  }

  const absl::string_view source_;
  const YamlLimits limits_;
  YamlDocument document_;
  std::vector<Frame> frames_;
  absl::flat_hash_map<YAML::anchor_t, Json> anchors_;
  int nodes_ = 0;
};

}  // namespace

absl::StatusOr<YamlDocument> ParseYaml(absl::string_view text, absl::string_view source,
                                       const YamlLimits& limits) {
  if (text.size() > limits.max_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(source, ": ", text.size(),
                                                     " bytes of YAML are more than the ",
                                                     limits.max_bytes, " allowed"));
  }
  if (!IsValidUtf8(text) || text.find('\0') != absl::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": is not UTF-8 text"));
  }
  std::istringstream stream{std::string(text)};
  try {
    YAML::Parser parser(stream);
    Builder builder(source, limits);
    if (!parser.HandleNextDocument(builder)) return builder.TakeDocument();
    YamlDocument document = builder.TakeDocument();
    Builder second(source, limits);
    if (parser.HandleNextDocument(second)) {
      return absl::InvalidArgumentError(
          absl::StrCat(source, ": holds more than one document; keep the first, without \"---\""));
    }
    return document;
  } catch (const Refusal& refusal) {
    return refusal.status;
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(source, ":", error.mark.line + 1, ":",
                                                   error.mark.column + 1, ": ", error.msg));
  }
}

}  // namespace muster
