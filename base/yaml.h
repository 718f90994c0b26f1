#ifndef MUSTER_BASE_YAML_H_
#define MUSTER_BASE_YAML_H_

#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

struct YamlLimits {
  size_t max_bytes = size_t{1} << 20;
  int max_depth = 32;
  // Counted after aliases are expanded.
  int max_nodes = 100'000;
};

struct YamlDocument {
  nlohmann::json value;
  // The position of each value: JSON pointer ("/fsdp_config/min_num_params") to line, from 1. For
  // error messages of code that checks the values.
  std::map<std::string, int> lines;
  // The same pointers in the order of the text, from 0: `value` sorts the keys of a map.
  std::map<std::string, int> order;
  // The same pointers, of plain integers that are not written as they print, to the text as
  // written: "010" for 8, "0x10" for 16, "1_000". For code that takes a number for text. Values
  // from an alias or a merge are left out.
  std::map<std::string, std::string> rewritten;
};

// Reads one YAML 1.1 document as JSON. Pure.
//
// Plain words become null (~, null, empty), booleans (yes/no, on/off, true/false, each in small,
// capitalised or capital letters), integers (decimal, 0x, 0b, leading 0 for octal; underscores
// allowed) or floats (with a point; .inf, .nan) as YAML 1.1 says, except that "12:30" stays text.
// "1e3" without a point is text in YAML 1.1. Quoted words stay text,
// !!str !!int !!float !!bool !!null force a type, other tags are refused. The keys of a map stay
// text as written. Anchors, aliases and merge keys ("<<") are expanded. An empty document is null.
//
// Errors: INVALID_ARGUMENT "SOURCE:LINE:COLUMN: why" for bad syntax, a key twice in one map, a key
// that is no plain text, more than one document, text that is not UTF-8; RESOURCE_EXHAUSTED beyond
// a limit.
absl::StatusOr<YamlDocument> ParseYaml(absl::string_view text, absl::string_view source,
                                       const YamlLimits& limits = {});

}  // namespace muster

#endif  // MUSTER_BASE_YAML_H_
