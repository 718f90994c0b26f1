#include "client/checkpoints/model_tree.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/text.h"

namespace muster::client {
namespace {

// More than the depth of any model; the planner recurses into modules.
constexpr size_t kMaxParts = 64;

constexpr absl::string_view kList = "ModuleList";

// The order in which transformers' GPT-2, Llama, Mixtral, Qwen2 and BERT register these.
constexpr absl::string_view kOrder[] = {
    "model",
    "transformer",
    "bert",
    "embed_tokens",
    "wte",
    "wpe",
    "embeddings",
    "word_embeddings",
    "position_ids",
    "position_embeddings",
    "encoder",
    "token_type_embeddings",
    "layers",
    "layer",
    "h",
    "ln_1",
    "attn",
    "ln_2",
    "self_attn",
    "self",
    "attention",
    "block_sparse_moe",
    "mlp",
    "c_attn",
    "c_fc",
    "c_proj",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "input_layernorm",
    "gate",
    "post_attention_layernorm",
    "experts",
    "w1",
    "w2",
    "w3",
    "query",
    "key",
    "value",
    "intermediate",
    "output",
    "transform",
    "dense",
    "LayerNorm",
    "norm",
    "ln_f",
    "pooler",
    "predictions",
    "decoder",
    "seq_relationship",
    "classifier",
    "cls",
    "score",
    "lm_head",
};

// Numbers by value, before names.
std::tuple<bool, size_t, std::string> NaturalKey(const std::string& part) {
  if (!IsDigits(part)) return {true, 0, part};
  const size_t first = std::min(part.find_first_not_of('0'), part.size() - 1);
  return {false, part.size() - first, part.substr(first)};
}

size_t KnownPlace(absl::string_view part) {
  return std::find(std::begin(kOrder), std::end(kOrder), part) - std::begin(kOrder);
}

bool IsBuffer(const TreeTensor& tensor, absl::string_view name) {
  static constexpr absl::string_view kBuffers[] = {
      "running_mean", "running_var", "num_batches_tracked",
      "position_ids", "inv_freq",    "masked_bias"};
  const bool named =
      std::find(std::begin(kBuffers), std::end(kBuffers), name) != std::end(kBuffers);
  const bool whole = absl::StartsWith(tensor.dtype, "I") || absl::StartsWith(tensor.dtype, "U") ||
                     tensor.dtype == "BOOL";
  return named || whole;
}

// A module while its parts are collected.
struct Node {
  std::map<std::string, Node> children;
  std::vector<PlannedTensor> parameters, buffers;
  size_t first_file = 0;
};

std::vector<const std::pair<const std::string, Node>*> InOrder(const Node& node) {
  std::vector<const std::pair<const std::string, Node>*> children;
  bool known = true;
  for (const auto& child : node.children) {
    children.push_back(&child);
    known = known && KnownPlace(child.first) < std::size(kOrder);
  }
  std::stable_sort(children.begin(), children.end(), [&](const auto* a, const auto* b) {
    if (known) return KnownPlace(a->first) < KnownPlace(b->first);
    return std::tuple(a->second.first_file, NaturalKey(a->first)) <
           std::tuple(b->second.first_file, NaturalKey(b->first));
  });
  return children;
}

bool IsList(const Node& node) {
  return !node.children.empty() && node.parameters.empty() && node.buffers.empty() &&
         std::all_of(node.children.begin(), node.children.end(),
                     [](const auto& child) { return IsDigits(child.first); });
}

PlannedModule ModuleOf(const std::string& name, const std::string& class_name, const Node& node) {
  PlannedModule module;
  module.name = name;
  module.class_name = IsList(node) ? std::string(kList) : class_name;
  module.parameters = node.parameters;
  module.buffers = node.buffers;
  for (const auto* child : InOrder(node)) {
    // An entry of a list has the list's name for a class.
    const std::string& child_class = IsDigits(child->first) ? class_name : child->first;
    module.children.push_back(ModuleOf(child->first, child_class, child->second));
  }
  return module;
}

bool IsEmbeddings(const PlannedModule& module) {
  return module.name == "embeddings" &&
         std::any_of(module.children.begin(), module.children.end(),
                     [](const PlannedModule& child) { return child.name == "word_embeddings"; });
}

void AddLayerClasses(const PlannedModule& module, std::set<std::string>* classes) {
  for (const PlannedModule& child : module.children) {
    const bool is_entry = module.class_name == kList && child.class_name != kList;
    if (is_entry || IsEmbeddings(child)) {
      classes->insert(child.class_name);
    } else {
      AddLayerClasses(child, classes);
    }
  }
}

PlannedModule* Child(PlannedModule* module, absl::string_view name) {
  for (PlannedModule& child : module->children) {
    if (child.name == name) return &child;
  }
  return nullptr;
}

// The full name of the embedding of words at `module` or below; empty if there is none.
std::string FindEmbedding(const PlannedModule& module, const std::string& name,
                          PlannedTensor* found) {
  for (const PlannedModule& child : module.children) {
    const std::string full = name.empty() ? child.name : absl::StrCat(name, ".", child.name);
    const bool fits =
        child.name == "embed_tokens" || child.name == "wte" || child.name == "word_embeddings";
    for (const PlannedTensor& tensor : child.parameters) {
      if (!fits || tensor.name != "weight") continue;
      *found = tensor;
      return absl::StrCat(full, ".weight");
    }
    std::string below = FindEmbedding(child, full, found);
    if (!below.empty()) return below;
  }
  return "";
}

}  // namespace

absl::StatusOr<PlannedModel> TreeOf(const std::vector<TreeTensor>& tensors) {
  Node root;
  std::map<std::string, std::vector<std::string>> by_storage;
  for (const TreeTensor& tensor : tensors) {
    const std::vector<std::string> parts = absl::StrSplit(tensor.name, '.');
    if (parts.size() > kMaxParts || std::find(parts.begin(), parts.end(), "") != parts.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor \"", Printable(tensor.name.substr(0, 200)),
          "\" is named as no module names its tensors: ",
          parts.size() > kMaxParts ? absl::StrCat("it has more than ", kMaxParts, " parts")
                                   : "a part between its dots is empty"));
    }
    Node* node = &root;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto [child, is_new] = node->children.try_emplace(parts[i]);
      node = &child->second;
      node->first_file = is_new ? tensor.file : std::min(node->first_file, tensor.file);
    }
    auto& part = IsBuffer(tensor, parts.back()) ? node->buffers : node->parameters;
    part.push_back({.name = parts.back(), .dtype = tensor.dtype, .shape = tensor.shape});
    if (!tensor.storage.empty()) by_storage[tensor.storage].push_back(tensor.name);
  }
  // A tensor and a module of one name would be one entry of the map.
  for (const TreeTensor& tensor : tensors) {
    const Node* node = &root;
    for (const absl::string_view part : absl::StrSplit(tensor.name, '.')) {
      const auto child = node->children.find(std::string(part));
      node = child == node->children.end() ? nullptr : &child->second;
      if (node == nullptr) break;
    }
    if (node == nullptr) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", Printable(tensor.name),
        "\" is both a tensor and a module that holds other tensors: no model has both"));
  }
  PlannedModel model;
  model.root = ModuleOf("", "Model", root);
  for (auto& [storage, names] : by_storage) {
    if (names.size() > 1) model.tied.push_back(std::move(names));
  }
  return model;
}

bool TieHead(PlannedModel* model) {
  PlannedTensor weight;
  const std::string embedding = FindEmbedding(model->root, "", &weight);
  if (embedding.empty()) return false;
  PlannedModule head;
  head.parameters.push_back(weight);
  std::string name = "lm_head";
  PlannedModule* parent = &model->root;
  // BERT's head is deeper, and has a bias that belongs to its parent.
  if (PlannedModule* const cls = Child(&model->root, "cls"); cls != nullptr) {
    parent = Child(cls, "predictions");
    if (parent == nullptr) return false;
    name = "decoder";
    for (const PlannedTensor& tensor : parent->parameters) {
      if (tensor.name == "bias") head.parameters.push_back(tensor);
    }
  }
  if (Child(parent, name) != nullptr) return true;
  const std::string full = name == "decoder" ? "cls.predictions.decoder" : name;
  head.name = head.class_name = name;
  model->tied.push_back({embedding, absl::StrCat(full, ".weight")});
  if (head.parameters.size() > 1) {
    model->tied.push_back({"cls.predictions.bias", absl::StrCat(full, ".bias")});
  }
  parent->children.push_back(std::move(head));
  return true;
}

std::set<std::string> LayerClasses(const PlannedModel& model) {
  std::set<std::string> classes;
  AddLayerClasses(model.root, &classes);
  return classes;
}

std::string TreeClass(absl::string_view class_name) {
  static const auto& classes = *new std::map<absl::string_view, const char*>{
      {"GPT2Block", "h"},
      {"Gpt2Block", "h"},
      {"LlamaDecoderLayer", "layers"},
      {"MistralDecoderLayer", "layers"},
      {"MixtralDecoderLayer", "layers"},
      {"Qwen2DecoderLayer", "layers"},
      {"DecoderLayer", "layers"},
      {"BertLayer", "layer"},
      {"BertEmbeddings", "embeddings"},
  };
  const auto found = classes.find(class_name);
  if (found != classes.end()) return found->second;
  (void)absl::ConsumeSuffix(&class_name, ".*");
  const size_t dot = class_name.rfind('.');
  return std::string(dot == absl::string_view::npos ? class_name : class_name.substr(dot + 1));
}

}  // namespace muster::client
