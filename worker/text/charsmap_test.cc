#include "worker/text/charsmap.h"

#include <gtest/gtest.h>

#include "absl/strings/escaping.h"

namespace muster::text {
namespace {

std::string Units(std::initializer_list<uint32_t> units) {
  std::string bytes;
  for (const uint32_t unit : units) {
    for (int i = 0; i < 4; ++i) bytes += static_cast<char>(unit >> (8 * i));
  }
  return bytes;
}

// Returns a trie with the one entry "A", whose replacement begins at byte 2 of the texts.
std::string OneEntry() {
  // The root's children are at 0 ^ label; "A" is unit 65, its leaf at 65 ^ 1.
  std::vector<uint32_t> units(66, 0xFF);
  units[0] = 0;
  units[65] = 'A' | 1 << 8 | 1u << 10;
  units[64] = 0x80000000 | 2;
  std::string bytes = Units({static_cast<uint32_t>(units.size() * 4)});
  for (const uint32_t unit : units) bytes += Units({unit});
  return absl::Base64Escape(bytes + std::string("x\0xyz\0", 6));
}

TEST(Charsmap, TextWithAnEntry_IsReplaced) {
  const auto map = Charsmap::Parse(OneEntry());
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_EQ(map->Find("A"), "xyz");
  EXPECT_EQ(map->Find("AB"), "xyz");
  EXPECT_EQ(map->Find("B"), absl::nullopt);
  EXPECT_EQ(map->Find(""), absl::nullopt);
}

TEST(Charsmap, BrokenTable_IsRefusedOrFindsNothing) {
  EXPECT_FALSE(Charsmap::Parse("no base64!").ok());
  EXPECT_FALSE(Charsmap::Parse("").ok());
  EXPECT_FALSE(Charsmap::Parse(absl::Base64Escape(Units({1000, 0}))).ok());
  EXPECT_FALSE(Charsmap::Parse(absl::Base64Escape(Units({4, 0}) + "\xFF")).ok());
  // A unit that points far away.
  const auto map = Charsmap::Parse(absl::Base64Escape(Units({4, 0xFFFFFC00})));
  ASSERT_TRUE(map.ok());
  EXPECT_EQ(map->Find("A"), absl::nullopt);
}

TEST(GraphemeClusters, CombiningMarksAndJoiners_StayWithTheirBase) {
  EXPECT_EQ(GraphemeClusters("e\xCC\x81x\r\n"),
            (std::vector<absl::string_view>{"e\xCC\x81", "x", "\r\n"}));
  EXPECT_TRUE(GraphemeClusters("").empty());
}

}  // namespace
}  // namespace muster::text
