#include "base/json.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/text.h"

namespace muster {
namespace {

std::string Position(absl::string_view text, size_t offset) {
  int line = 1;
  int column = 1;
  for (const char c : text.substr(0, std::min(offset, text.size()))) {
    if (c == '\n') {
      ++line;
      column = 1;
    } else {
      ++column;
    }
  }
  return absl::StrCat(line, ":", column);
}

// Thrown out of the parser's callback, which has no other way to stop.
struct Refusal {
  absl::Status status;
};

// nlohmann's messages carry an identifier in brackets and the position, which we report in another
// form.
std::string Reason(absl::string_view what) {
  const size_t syntax = what.find("syntax error");
  const size_t bracket = what.find("] ");
  if (syntax != absl::string_view::npos) {
    what.remove_prefix(syntax);
  } else if (bracket != absl::string_view::npos) {
    what.remove_prefix(bracket + 2);
  }
  // The parser quotes what it last read, which may be cut inside a character.
  return Printable(what, 300);
}

}  // namespace

absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text, absl::string_view source,
                                         const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%s: %d bytes of JSON are more than the %d allowed", source, text.size(),
                        limits.max_bytes));
  }
  // The parser skips a byte order mark and takes a zero byte for the end of the text.
  if (text.substr(0, 3) == "\xEF\xBB\xBF") {
    return absl::InvalidArgumentError(
        absl::StrCat(source, ":1:1: begins with a byte order mark; save it as plain UTF-8"));
  }
  if (const size_t nul = text.find('\0'); nul != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat(source, ":", Position(text, nul), ": holds a zero byte"));
  }
  std::vector<absl::flat_hash_set<std::string>> names;
  const auto watch = [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    switch (event) {
      case nlohmann::json::parse_event_t::object_start:
      case nlohmann::json::parse_event_t::array_start:
        if (depth >= limits.max_depth) {
          throw Refusal{absl::ResourceExhaustedError(absl::StrCat(
              source, ": nested deeper than the ", limits.max_depth, " levels allowed"))};
        }
        names.emplace_back();
        break;
      case nlohmann::json::parse_event_t::object_end:
      case nlohmann::json::parse_event_t::array_end:
        names.pop_back();
        break;
      case nlohmann::json::parse_event_t::key: {
        const std::string& name = value.get_ref<const std::string&>();
        if (!names.back().insert(name).second) {
          throw Refusal{absl::InvalidArgumentError(absl::StrCat(
              source, ": the name \"", Printable(name), "\" occurs twice in one object"))};
        }
        break;
      }
      case nlohmann::json::parse_event_t::value:
        break;
    }
    return true;
  };
  try {
    return nlohmann::json::parse(text.begin(), text.end(), watch);
  } catch (const Refusal& refusal) {
    return refusal.status;
  } catch (const nlohmann::json::parse_error& error) {
    const size_t offset = error.byte > 0 ? error.byte - 1 : 0;
    return absl::InvalidArgumentError(
        absl::StrCat(source, ":", Position(text, offset), ": ", Reason(error.what())));
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": ", Reason(error.what())));
  }
}

std::string JsonQuote(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          absl::StrAppendFormat(&out, "\\u%04x", c);
        } else {
          out += c;
        }
    }
  }
  out += '"';
  return out;
}

}  // namespace muster
