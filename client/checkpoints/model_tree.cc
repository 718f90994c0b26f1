#include "client/checkpoints/model_tree.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace muster::client {
namespace {

bool IsNumber(absl::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), absl::ascii_isdigit);
}

// What transformers calls a block, by model_type.
std::string BlockName(absl::string_view model_type) {
  static const auto& names =
      *new std::map<absl::string_view, const char*>{{"gpt2", "GPT2Block"},
                                                    {"llama", "LlamaDecoderLayer"},
                                                    {"mistral", "MistralDecoderLayer"},
                                                    {"mixtral", "MixtralDecoderLayer"},
                                                    {"qwen2", "Qwen2DecoderLayer"},
                                                    {"bert", "BertLayer"}};
  const auto found = names.find(model_type);
  return found == names.end() ? "" : found->second;
}

// When a module of this name runs among its neighbours.
int TurnOf(const std::string& name) {
  static const auto& turns = *new std::map<std::string, int>{{"embeddings", 0},
                                                             {"embed_tokens", 0},
                                                             {"embed", 0},
                                                             {"wte", 0},
                                                             {"wpe", 0},
                                                             {"shared", 0},
                                                             {"norm", 2},
                                                             {"ln_f", 2},
                                                             {"final_layernorm", 2},
                                                             {"final_layer_norm", 2},
                                                             {"pooler", 3},
                                                             {"lm_head", 4},
                                                             {"score", 4},
                                                             {"classifier", 4},
                                                             {"cls", 4},
                                                             {"qa_outputs", 4},
                                                             {"head", 4}};
  const auto found = turns.find(name);
  return found == turns.end() ? 1 : found->second;
}

std::tuple<int, uint64_t, std::string> OrderOf(const PlannedModule& module) {
  uint64_t number = 0;
  if (IsNumber(module.name)) (void)absl::SimpleAtoi(module.name, &number);
  return {TurnOf(module.name), number, module.name};
}

void Finish(PlannedModule& module, const std::string& pattern, bool in_block,
            const std::string& block_name) {
  const bool is_block = !in_block && IsNumber(module.name);
  module.class_name = is_block && !block_name.empty() ? block_name : pattern;
  std::sort(module.children.begin(), module.children.end(),
            [](const auto& a, const auto& b) { return OrderOf(a) < OrderOf(b); });
  for (PlannedModule& child : module.children) {
    const std::string part = IsNumber(child.name) ? "*" : child.name;
    Finish(child, pattern.empty() ? part : absl::StrCat(pattern, ".", part), in_block || is_block,
           block_name);
  }
}

void FindBlocks(const PlannedModule& module, std::set<std::string>& classes) {
  for (const PlannedModule& child : module.children) {
    if (IsNumber(child.name)) {
      classes.insert(child.class_name);
    } else {
      FindBlocks(child, classes);
    }
  }
}

}  // namespace

PlannedModel TreeOf(const std::vector<PlannedTensor>& tensors, absl::string_view model_type) {
  PlannedModel model;
  for (const PlannedTensor& tensor : tensors) {
    std::vector<std::string> path = absl::StrSplit(tensor.name, '.');
    PlannedModule* module = &model.root;
    for (size_t i = 0; i + 1 < path.size(); ++i) {
      const auto child =
          std::find_if(module->children.begin(), module->children.end(),
                       [&](const PlannedModule& other) { return other.name == path[i]; });
      if (child != module->children.end()) {
        module = &*child;
        continue;
      }
      module->children.emplace_back();
      module = &module->children.back();
      module->name = path[i];
    }
    module->parameters.push_back({path.back(), tensor.dtype, tensor.shape});
  }
  Finish(model.root, "", /*in_block=*/false, BlockName(model_type));
  return model;
}

std::set<std::string> BlockClasses(const PlannedModel& model) {
  std::set<std::string> classes;
  FindBlocks(model.root, classes);
  return classes;
}

std::vector<std::string> Shortened(const std::vector<std::string>& names) {
  std::vector<std::string> shortened;
  for (size_t i = 0; i < names.size();) {
    const size_t dot = names[i].rfind('.');
    uint64_t first = 0;
    size_t next = i + 1;
    if (dot != std::string::npos && IsNumber(names[i].substr(dot + 1)) &&
        absl::SimpleAtoi(names[i].substr(dot + 1), &first)) {
      const std::string list = names[i].substr(0, dot + 1);
      while (next < names.size() && names[next] == absl::StrCat(list, first + (next - i))) ++next;
    }
    shortened.push_back(next == i + 1 ? names[i]
                                      : absl::StrCat(names[i], "-", first + (next - i) - 1));
    i = next;
  }
  return shortened;
}

}  // namespace muster::client
