#include "worker/text/ordered_json.h"

#include <string>
#include <utility>
#include <vector>

#include "base/status_macros.h"

namespace muster::text {
namespace {

using Json = nlohmann::ordered_json;

// Builds the value of a text that ParseJson accepts. The library's own builder looks for each name
// among all names before it, so it takes the square of their number.
class Builder final : public nlohmann::json_sax<Json> {
 public:
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
    name_ = std::move(name);
    return true;
  }
  bool parse_error(size_t, const std::string&, const Json::exception&) override { return false; }

 private:
  using Members = Json::object_t::Container;

  // The last element of a list or object stays in its place as long as it is open.
  Json* Append(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (open_.back()->is_array()) return &open_.back()->emplace_back(std::move(value));
    Members& members = open_.back()->get_ref<Json::object_t&>();
    members.emplace_back(std::move(name_), std::move(value));
    return &members.back().second;
  }
  bool Add(Json value) {
    Append(std::move(value));
    return true;
  }
  bool Open(Json empty) {
    open_.push_back(Append(std::move(empty)));
    return true;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }

  Json root_;
  std::string name_;         // of the next value, if it is in an object
  std::vector<Json*> open_;  // objects and arrays, from the outermost to the innermost
};

}  // namespace

absl::StatusOr<Json> ParseOrderedJson(absl::string_view text, absl::string_view source,
                                      const JsonLimits& limits) {
  // Says what is wrong, such as a name that occurs twice in one object.
  MUSTER_RETURN_IF_ERROR(ParseJson(text, source, limits).status());
  Builder builder;
  Json::sax_parse(text.begin(), text.end(), &builder);
  return builder.Take();
}

}  // namespace muster::text
