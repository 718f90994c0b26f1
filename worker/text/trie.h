#ifndef MUSTER_WORKER_TEXT_TRIE_H_
#define MUSTER_WORKER_TEXT_TRIE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace muster::text {

// A set of texts with a value each, for finding those with which a text begins. Immutable,
// thread-safe.
class Trie {
 public:
  static constexpr uint32_t kNoValue = 0xFFFFFFFF;
  static constexpr uint32_t kNowhere = 0xFFFFFFFF;
  static constexpr uint32_t kRoot = 0;

  Trie() : Trie(std::vector<std::pair<absl::string_view, uint32_t>>()) {}
  // The first of equal texts counts. An empty text is ignored.
  explicit Trie(std::vector<std::pair<absl::string_view, uint32_t>> entries);

  // Returns the node after `byte`; kNowhere if there is none.
  uint32_t Step(uint32_t node, unsigned char byte) const {
    const Node& at = nodes_[node];
    // Most nodes have one child.
    if (at.count == 1) return labels_[at.first] == byte ? children_[at.first] : kNowhere;
    if (at.count > 16) return FindMany(at, byte);
    for (uint32_t i = at.first; i < at.first + at.count; ++i) {
      if (labels_[i] == byte) return children_[i];
    }
    return kNowhere;
  }
  // Returns the value of the text that ends at the node; kNoValue if none does.
  uint32_t Value(uint32_t node) const { return nodes_[node].value; }

  // Returns the node to which `text` leads from the root; kNowhere if it leaves the trie.
  uint32_t Walk(absl::string_view text) const;

 private:
  struct Node {
    uint32_t first = 0;  // start of its children in labels_ and children_
    uint32_t count = 0;
    uint32_t value = kNoValue;
  };

  uint32_t FindMany(const Node& node, unsigned char byte) const;

  std::vector<Node> nodes_;
  std::vector<unsigned char> labels_;  // bytes of a node's children, sorted
  std::vector<uint32_t> children_;
};

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_TRIE_H_
