#include "worker/text/post_processors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "worker/text/test_parts.h"

namespace muster::text {
namespace {

using Json = nlohmann::json;
using testing::HasSubstr;
using Ids = std::vector<int64_t>;

Encoding Of(const std::vector<std::string>& tokens, int64_t type_id) {
  Encoding encoding;
  int64_t at = 0;
  for (const std::string& token : tokens) {
    encoding.ids.push_back(10 + static_cast<int64_t>(encoding.ids.size()));
    encoding.tokens.push_back(token);
    const auto size = static_cast<int64_t>(token.size());
    encoding.offsets.push_back({at, at + size});
    at += size;
  }
  encoding.type_ids.assign(tokens.size(), type_id);
  encoding.special_tokens_mask.assign(tokens.size(), 0);
  encoding.attention_mask.assign(tokens.size(), 1);
  return encoding;
}

struct Result {
  Ids ids, type_ids, special;
};

Result Processed(const Json& json, bool pair, bool add_special_tokens = true) {
  const auto processor = Ok(MakePostProcessor(json, "p"));
  std::vector<Encoding> parts = {Of({"a"}, 0)};
  if (pair) parts.push_back(Of({"b", "c"}, 1));
  size_t before = 0, after = 0;
  for (const Encoding& part : parts) before += part.size();
  processor->Process(parts, add_special_tokens);
  Result result;
  for (const Encoding& part : parts) {
    after += part.size();
    result.ids.insert(result.ids.end(), part.ids.begin(), part.ids.end());
    result.type_ids.insert(result.type_ids.end(), part.type_ids.begin(), part.type_ids.end());
    result.special.insert(result.special.end(), part.special_tokens_mask.begin(),
                          part.special_tokens_mask.end());
  }
  if (add_special_tokens) {
    EXPECT_EQ(after - before, static_cast<size_t>(processor->AddedTokens(pair)));
  }
  return result;
}

Json Special(const char* id, int type_id) {
  return {{"SpecialToken", {{"id", id}, {"type_id", type_id}}}};
}
Json Text(const char* id, int type_id) {
  return {{"Sequence", {{"id", id}, {"type_id", type_id}}}};
}

Json Template() {
  return {{"type", "TemplateProcessing"},
          {"single", {Special("[CLS]", 0), Text("A", 0)}},
          {"pair", {Special("[CLS]", 0), Text("A", 0), Special("[CLS]", 3), Text("B", 1)}},
          {"special_tokens", {{"[CLS]", {{"id", "[CLS]"}, {"ids", {1}}, {"tokens", {"[CLS]"}}}}}}};
}

TEST(PostProcessors, Template_PutsSpecialTokensAround) {
  EXPECT_EQ(Processed(Template(), false).ids, (Ids{1, 10}));
  const Result pair = Processed(Template(), true);
  EXPECT_EQ(pair.ids, (Ids{1, 10, 1, 10, 11}));
  EXPECT_EQ(pair.type_ids, (Ids{0, 0, 3, 1, 1}));
  EXPECT_EQ(pair.special, (Ids{1, 0, 1, 0, 0}));
  EXPECT_EQ(Processed(Template(), true, false).ids, (Ids{10, 10, 11}));
}

TEST(PostProcessors, BertAndRoberta_HaveTheirOwnForms) {
  const Json bert = {{"type", "BertProcessing"}, {"sep", {"[SEP]", 2}}, {"cls", {"[CLS]", 1}}};
  EXPECT_EQ(Processed(bert, false).ids, (Ids{1, 10, 2}));
  const Result pair = Processed(bert, true);
  EXPECT_EQ(pair.ids, (Ids{1, 10, 2, 10, 11, 2}));
  EXPECT_EQ(pair.type_ids, (Ids{0, 0, 0, 1, 1, 1}));
  const Json roberta = {{"type", "RobertaProcessing"},
                        {"sep", {"</s>", 2}},
                        {"cls", {"<s>", 1}},
                        {"trim_offsets", true},
                        {"add_prefix_space", true}};
  const Result two = Processed(roberta, true);
  EXPECT_EQ(two.ids, (Ids{1, 10, 2, 2, 10, 11, 2}));
  EXPECT_EQ(two.type_ids, (Ids{0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(Processed(roberta, true, false).type_ids, (Ids{0, 0, 0}));
}

TEST(PostProcessors, ByteLevel_TrimsBlanksFromRanges) {
  const Json json = {
      {"type", "Sequence"},
      {"processors",
       {{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}}, Template()}}};
  const auto processor = Ok(MakePostProcessor(json, "p"));
  std::vector<Encoding> parts = {Of({" ab", "c "}, 0)};
  parts[0].overflowing = {Of({" x"}, 0)};
  processor->Process(parts, false);
  EXPECT_EQ(parts[0].offsets, (std::vector<Encoding::Offsets>{{1, 3}, {3, 4}}));
  EXPECT_EQ(parts[0].overflowing[0].offsets, (std::vector<Encoding::Offsets>{{1, 2}}));
}

TEST(PostProcessors, WhatIsWrong_IsNamed) {
  const auto message = [](const Json& json) {
    return std::string(MakePostProcessor(json, "f.post_processor").status().message());
  };
  Json json = Template();
  json["single"] = {Special("[SEP]", 0)};
  EXPECT_THAT(message(json), HasSubstr("f.post_processor.single[0].id: \"[SEP]\" is not in"));
  json["single"] = {Text("B", 0)};
  EXPECT_THAT(message(json), HasSubstr("uses sequence B"));
  EXPECT_THAT(message({{"type", "X"}}), HasSubstr("f.post_processor: type 'X' is not supported"));
  EXPECT_THAT(message({{"type", "BertProcessing"}, {"sep", 1}, {"cls", {"a", 1}}}),
              HasSubstr("f.post_processor.sep"));
  EXPECT_EQ(Ok(MakePostProcessor(nullptr, "p")), nullptr);
}

}  // namespace
}  // namespace muster::text
