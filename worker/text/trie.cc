#include "worker/text/trie.h"

#include <algorithm>
#include <deque>

namespace muster::text {

Trie::Trie(std::vector<std::pair<absl::string_view, uint32_t>> entries) {
  std::stable_sort(entries.begin(), entries.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  // Breadth first: the entries [begin, end) share the `depth` bytes that lead to `node`.
  struct Work {
    uint32_t node;
    size_t begin;
    size_t end;
    size_t depth;
  };
  std::deque<Work> todo;
  nodes_.emplace_back();
  todo.push_back({kRoot, 0, entries.size(), 0});
  while (!todo.empty()) {
    Work work = todo.front();
    todo.pop_front();
    const auto ends_here = [&](size_t i) { return entries[i].first.size() == work.depth; };
    if (work.begin < work.end && ends_here(work.begin)) {
      if (work.depth > 0) nodes_[work.node].value = entries[work.begin].second;
      while (work.begin < work.end && ends_here(work.begin)) ++work.begin;
    }
    nodes_[work.node].first = static_cast<uint32_t>(labels_.size());
    for (size_t begin = work.begin; begin < work.end;) {
      const char label = entries[begin].first[work.depth];
      size_t end = begin;
      while (end < work.end && entries[end].first[work.depth] == label) ++end;
      labels_.push_back(static_cast<unsigned char>(label));
      children_.push_back(static_cast<uint32_t>(nodes_.size()));
      todo.push_back({static_cast<uint32_t>(nodes_.size()), begin, end, work.depth + 1});
      nodes_.emplace_back();
      ++nodes_[work.node].count;
      begin = end;
    }
  }
}

uint32_t Trie::FindMany(const Node& node, unsigned char byte) const {
  const auto begin = labels_.begin() + node.first;
  const auto end = begin + node.count;
  const auto found = std::lower_bound(begin, end, byte);
  return found == end || *found != byte ? kNowhere
                                        : children_[static_cast<size_t>(found - labels_.begin())];
}

uint32_t Trie::Walk(absl::string_view text) const {
  uint32_t node = kRoot;
  for (const char c : text) {
    node = Step(node, static_cast<unsigned char>(c));
    if (node == kNowhere) break;
  }
  return node;
}

}  // namespace muster::text
