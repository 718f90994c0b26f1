// GCC 12 takes what <regex> moves for uninitialized when it builds for sanitizers.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "worker/train/param_groups.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <map>
#include <regex>
#include <set>

#include "c10/util/Exception.h"
#include "torch/nn/module.h"

namespace muster {
namespace {

std::regex Expression(const std::string& pattern) {
  try {
    return std::regex(pattern);
  } catch (const std::regex_error& error) {
    TORCH_CHECK(false, "groups of parameters: '", pattern, "' is no regular expression (",
                error.what(), ")");
  }
}

void CheckMatched(const std::string& pattern, bool matched, const NamedParameters& parameters) {
  if (matched) return;
  std::string names;
  for (const auto& [name, unused] : parameters) names += (names.empty() ? "" : ", ") + name;
  TORCH_CHECK(false, "groups of parameters: no parameter's name is '", pattern, "'; the model has ",
              names);
}

// Puts each tensor into list number `list_of(name)` of `count`. `name_of(list)` is for the message.
std::vector<std::vector<at::Tensor>> Split(const NamedParameters& parameters, size_t count,
                                           const std::function<size_t(const std::string&)>& list_of,
                                           const std::function<std::string(size_t)>& name_of) {
  std::vector<std::vector<at::Tensor>> lists(count);
  std::map<const void*, std::pair<std::string, size_t>> seen;
  for (const auto& [name, tensor] : parameters) {
    const size_t list = list_of(name);
    const auto [first, is_new] =
        seen.emplace(tensor.unsafeGetTensorImpl(), std::make_pair(name, list));
    if (is_new) lists[list].push_back(tensor);
    const auto& [first_name, first_list] = first->second;
    TORCH_CHECK(first_list == list, "groups of parameters: '", first_name, "' and '", name,
                "' are one tensor, but the first is in the group ", name_of(first_list),
                " and the second in the group ", name_of(list), ": give both names the same group");
  }
  return lists;
}

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

// Matches "ln", "ln_1", "ln_f", "bn2".
bool IsShortNorm(const std::string& part) {
  static const std::regex& expression = *new std::regex("(ln|bn)(_?[0-9]+|_f)?");
  return std::regex_match(part, expression);
}

// Decides by the components of the name.
bool IsBiasOrOfNorm(const std::string& name) {
  const size_t dot = name.rfind('.');
  const std::string last = Lower(dot == std::string::npos ? name : name.substr(dot + 1));
  constexpr char kBias[] = "bias";
  constexpr size_t kLength = sizeof(kBias) - 1;
  if (last.rfind(kBias, 0) == 0) return true;
  if (last.size() >= kLength && last.compare(last.size() - kLength, kLength, kBias) == 0) {
    return true;
  }
  for (size_t begin = 0; dot != std::string::npos && begin <= dot;) {
    const size_t end = name.find('.', begin);
    const std::string part = Lower(name.substr(begin, end - begin));
    if (part.find("norm") != std::string::npos || IsShortNorm(part)) return true;
    begin = end + 1;
  }
  return false;
}

DecayLists SplitForDecay(const NamedParameters& parameters, const std::string& no_decay,
                         const std::set<std::string>& of_norms) {
  std::regex expression;
  if (!no_decay.empty()) expression = Expression(no_decay);
  bool matched = no_decay.empty();
  std::vector<std::vector<at::Tensor>> lists = Split(
      parameters, 2,
      [&](const std::string& name) -> size_t {
        const bool named = !no_decay.empty() && std::regex_match(name, expression);
        matched = matched || named;
        return named || of_norms.count(name) > 0 || IsBiasOrOfNorm(name) ? 1 : 0;
      },
      [](size_t list) { return list == 0 ? "with decay" : "without decay"; });
  CheckMatched(no_decay, matched, parameters);
  return {std::move(lists[0]), std::move(lists[1])};
}

}  // namespace

NamedParameters NamedParametersOf(const torch::nn::Module& module) {
  NamedParameters parameters;
  for (const auto& item : module.named_parameters()) {
    parameters.emplace_back(item.key(), item.value());
  }
  return parameters;
}

DecayLists SplitForDecay(const torch::nn::Module& module, const std::string& no_decay) {
  std::set<std::string> of_norms;
  const auto add = [&of_norms](const torch::nn::Module& norm, const std::string& prefix) {
    if (Lower(norm.name()).find("norm") == std::string::npos) return;
    for (const auto& item : norm.named_parameters(/*recurse=*/false)) {
      of_norms.insert(prefix + item.key());
    }
  };
  add(module, "");
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    add(*item.value(), item.key() + ".");
  }
  return SplitForDecay(NamedParametersOf(module), no_decay, of_norms);
}

DecayLists SplitForDecay(const NamedParameters& parameters, const std::string& no_decay) {
  return SplitForDecay(parameters, no_decay, {});
}

std::vector<std::vector<at::Tensor>> SplitByName(const NamedParameters& parameters,
                                                 const std::vector<std::string>& patterns) {
  std::vector<std::regex> expressions;
  for (const std::string& pattern : patterns) expressions.push_back(Expression(pattern));
  std::vector<bool> matched(patterns.size());
  std::vector<std::vector<at::Tensor>> lists = Split(
      parameters, patterns.size() + 1,
      [&](const std::string& name) {
        size_t list = patterns.size();
        for (size_t i = patterns.size(); i-- > 0;) {
          if (!std::regex_match(name, expressions[i])) continue;
          matched[i] = true;
          list = i;
        }
        return list;
      },
      [&](size_t list) {
        return list == patterns.size() ? std::string("of the rest") : "'" + patterns[list] + "'";
      });
  for (size_t i = 0; i < patterns.size(); ++i) CheckMatched(patterns[i], matched[i], parameters);
  return lists;
}

}  // namespace muster
