#include "worker/text/trie.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>

namespace muster::text {
namespace {

TEST(Trie, RandomTexts_AreFoundAsInAMap) {
  std::mt19937_64 random(7);
  std::map<std::string, uint32_t> known;
  std::vector<std::string> texts;
  for (uint32_t i = 0; i < 2000; ++i) {
    std::string text;
    const uint64_t length = random() % 6;
    // Some nodes have many children, most have few.
    for (uint64_t j = 0; j < length; ++j) {
      text += static_cast<char>(j == 0 ? random() : 'a' + random() % 3);
    }
    texts.push_back(text);
    if (!text.empty()) known.emplace(text, i);
  }
  std::vector<std::pair<absl::string_view, uint32_t>> entries;
  for (uint32_t i = 0; i < texts.size(); ++i) entries.emplace_back(texts[i], i);
  const Trie trie(entries);
  for (const auto& [text, value] : known) {
    const uint32_t node = trie.Walk(text);
    ASSERT_NE(node, Trie::kNowhere);
    EXPECT_EQ(trie.Value(node), value);
    const uint32_t longer = trie.Walk(text + "a");
    const auto found = known.find(text + "a");
    const uint32_t got = longer == Trie::kNowhere ? Trie::kNoValue : trie.Value(longer);
    EXPECT_EQ(got, found == known.end() ? Trie::kNoValue : found->second);
  }
  EXPECT_EQ(trie.Value(Trie::kRoot), Trie::kNoValue);
}

TEST(Trie, Empty_LeadsNowhere) { EXPECT_EQ(Trie().Walk("a"), Trie::kNowhere); }

}  // namespace
}  // namespace muster::text
