#include "base/json.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/ordered_json.h"
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

// The members of objects by name: a new member, or null for a name that the object has already.
class SortedMembers {
 public:
  using Json = nlohmann::json;

  void Open() {}
  void Close() {}
  Json* Add(Json& object, const std::string& name) {
    return object.contains(name) ? nullptr : &object[name];
  }
};

// Members in the order of the text. (The library compares a name with all names before it, so its
// time grows with the square of their number.)
class OrderedMembers {
 public:
  using Json = nlohmann::ordered_json;

  void Open() { names_.emplace_back(); }
  void Close() { names_.pop_back(); }
  Json* Add(Json& object, const std::string& name) {
    if (!names_.back().insert(name).second) return nullptr;
    Json::object_t::Container& members = object.get_ref<Json::object_t&>();
    return &members.emplace_back(name, nullptr).second;
  }

 private:
  std::vector<absl::flat_hash_set<std::string>> names_;  // the names in each open object
};

// Builds the value. (The parser with a callback looks at all members of an array for each object in
// it, so its time grows with the square of their number.)
template <class Members>
class Builder final : public nlohmann::json_sax<typename Members::Json> {
 public:
  using Json = typename Members::Json;
  using Base = nlohmann::json_sax<Json>;
  using typename Base::binary_t;
  using typename Base::number_float_t;
  using typename Base::number_integer_t;
  using typename Base::number_unsigned_t;
  using typename Base::string_t;

  Builder(absl::string_view text, absl::string_view source, int max_depth)
      : text_(text), source_(source), max_depth_(max_depth) {}

  // Why there is no value.
  const absl::Status& status() const { return status_; }
  Json Take() { return std::move(root_); }

  bool null() override { return Add(nullptr); }
  bool boolean(bool value) override { return Add(value); }
  bool number_integer(number_integer_t value) override { return Add(value); }
  bool number_unsigned(number_unsigned_t value) override { return Add(value); }
  bool number_float(number_float_t value, const string_t&) override { return Add(value); }
  bool string(string_t& value) override { return Add(std::move(value)); }
  bool binary(binary_t& value) override { return Add(std::move(value)); }
  bool start_object(size_t) override { return Open(Json::object()); }
  bool start_array(size_t) override { return Open(Json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(string_t& name) override {
    member_ = members_.Add(*open_.back(), name);
    if (member_ != nullptr) return true;
    return Refuse(absl::InvalidArgumentError(
        absl::StrCat(source_, ": the name \"", Printable(name), "\" occurs twice in one object")));
  }
  bool parse_error(size_t position, const std::string&,
                   const typename Json::exception& error) override {
    const bool has_place = dynamic_cast<const typename Json::parse_error*>(&error) != nullptr;
    const size_t offset = position > 0 ? position - 1 : 0;
    return Refuse(absl::InvalidArgumentError(
        absl::StrCat(source_, has_place ? absl::StrCat(":", Position(text_, offset)) : "", ": ",
                     Reason(error.what()))));
  }

 private:
  bool Refuse(absl::Status why) {
    status_ = std::move(why);
    return false;
  }
  // Returns the place of the next value. The address of a map's member is stable; that of the last
  // element of a list or of ordered members is stable as long as the list or object is open.
  Json* Place() {
    if (open_.empty()) return &root_;
    if (open_.back()->is_object()) return member_;
    return &open_.back()->emplace_back();
  }
  bool Add(Json value) {
    *Place() = std::move(value);
    return true;
  }
  bool Open(Json empty) {
    if (open_.size() >= static_cast<size_t>(max_depth_)) {
      return Refuse(absl::ResourceExhaustedError(
          absl::StrCat(source_, ": nested deeper than the ", max_depth_, " levels allowed")));
    }
    Json* const place = Place();
    *place = std::move(empty);
    open_.push_back(place);
    members_.Open();
    return true;
  }
  bool Close() {
    open_.pop_back();
    members_.Close();
    return true;
  }

  const absl::string_view text_;
  const absl::string_view source_;
  const int max_depth_;
  Json root_;
  Members members_;
  std::vector<Json*> open_;  // objects and arrays, from the outermost to the innermost
  Json* member_ = nullptr;   // in the innermost object
  absl::Status status_;
};

template <class Members>
absl::StatusOr<typename Members::Json> Parse(absl::string_view text, absl::string_view source,
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
  Builder<Members> builder(text, source, limits.max_depth);
  if (!Members::Json::sax_parse(text.begin(), text.end(), &builder)) return builder.status();
  return builder.Take();
}

}  // namespace

absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text, absl::string_view source,
                                         const JsonLimits& limits) {
  return Parse<SortedMembers>(text, source, limits);
}

absl::StatusOr<nlohmann::ordered_json> ParseOrderedJson(absl::string_view text,
                                                        absl::string_view source,
                                                        const JsonLimits& limits) {
  return Parse<OrderedMembers>(text, source, limits);
}

}  // namespace muster
