#include "worker/text/sentence_pieces.h"

#include <cstdlib>
#include <random>

#include "absl/strings/str_cat.h"
#include "base/mutate.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/text/sentence_piece_model.pb.h"

namespace muster::text {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;
using Model = SentencePieceModel;

Model ModelOf(const std::vector<std::string>& pieces) {
  Model model;
  for (const std::string& piece : pieces) model.add_pieces()->set_piece(piece);
  model.mutable_trainer_spec()->set_model_type(Model::Trainer::BPE);
  return model;
}

std::string Error(const Model& model) {
  const auto read = ReadSentencePieces(model.SerializeAsString());
  EXPECT_FALSE(read.ok());
  return std::string(read.status().message());
}

TEST(ReadSentencePieces, Pieces_HaveTheirKinds) {
  Model model = ModelOf({"<unk>", "<s>", "XY", "<0x41>", "▁a"});
  model.mutable_pieces(0)->set_type(Model::Piece::UNKNOWN);
  model.mutable_pieces(1)->set_type(Model::Piece::CONTROL);
  model.mutable_pieces(2)->set_type(Model::Piece::USER_DEFINED);
  model.mutable_pieces(3)->set_type(Model::Piece::BYTE);
  const auto read = ReadSentencePieces(model.SerializeAsString());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->algorithm, "BPE");
  ASSERT_EQ(read->pieces.size(), 5u);
  EXPECT_EQ(read->pieces[4].text, "▁a");
  for (const size_t id : {0, 1, 2, 3, 4}) {
    EXPECT_EQ(read->pieces[id].is_added, id == 1 || id == 2) << id;
    EXPECT_EQ(read->pieces[id].is_control, id == 1) << id;
  }
}

// As in SentencePiece, where the field has this default.
TEST(ReadSentencePieces, ModelThatDoesNotSayItsAlgorithm_IsUnigram) {
  Model model = ModelOf({"a"});
  model.clear_trainer_spec();
  EXPECT_EQ(ReadSentencePieces(model.SerializeAsString())->algorithm, "UNIGRAM");
}

TEST(ReadSentencePieces, WhatIsNoModel_IsNotFound) {
  // Llama 3's tokenizer.model is such a list.
  for (const std::string& bytes :
       {std::string(), std::string("IQ== 0\nIg== 1\n"), ModelOf({}).SerializeAsString()}) {
    EXPECT_EQ(ReadSentencePieces(bytes).status().code(), absl::StatusCode::kNotFound);
  }
}

TEST(ReadSentencePieces, PieceThatCannotBe_IsNamed) {
  EXPECT_THAT(Error(ModelOf({"a", ""})), HasSubstr("piece 1 (\"\") is empty"));
  EXPECT_THAT(Error(ModelOf({"a", "b", "a"})), HasSubstr("piece 2 (\"a\") is there twice"));
  EXPECT_THAT(Error(ModelOf({"\xFF"})), HasSubstr("piece 0 (\"\\xff\") is not UTF-8"));
  EXPECT_THAT(Error(ModelOf({std::string(1025, 'a')})), HasSubstr("is too long"));
}

TEST(MergesOf, EveryWayToPutAPieceTogether_InTheOrderOfWhatComesOut) {
  const auto merges = [](const std::vector<std::string>& pieces) {
    return *MergesOf(ReadSentencePieces(ModelOf(pieces).SerializeAsString())->pieces);
  };
  EXPECT_THAT(merges({"ab", "a", "b", "abc", "bc", "c"}),
              ElementsAre(Pair("a", "b"), Pair("a", "bc"), Pair("ab", "c"), Pair("b", "c")));
  // Characters, not bytes.
  EXPECT_THAT(merges({"▁é", "▁", "é", "\xC3\xA9\xC3\xA9"}),
              ElementsAre(Pair("▁", "é"), Pair("é", "é")));
}

TEST(MergesOf, MoreThanAnyModelHas_AreRefused) {
  std::vector<SentencePiece> pieces;
  for (size_t size = 1; size <= 1024; ++size) pieces.push_back({.text = std::string(size, 'a')});
  EXPECT_THAT(std::string(MergesOf(pieces).status().message()), HasSubstr("more merges"));
}

TEST(ReadSentencePieces, DamagedFiles_AreErrorsOrPieces) {
  int64_t cases = 20'000, read = 0;
  if (const char* const wanted = std::getenv("MUSTER_FUZZ_CASES")) cases = std::atoll(wanted);
  std::mt19937_64 random(1);
  Model model = ModelOf({"<unk>", "<s>", "a", "b", "ab", "▁", "▁ab", "é", "<0x41>"});
  model.mutable_pieces(1)->set_type(Model::Piece::CONTROL);
  const std::string whole = model.SerializeAsString();
  for (int64_t i = 0; i < cases; ++i) {
    const auto pieces = ReadSentencePieces(Mutate(whole, random));
    if (!pieces.ok()) continue;
    ++read;
    const auto merges = MergesOf(pieces->pieces);
    ASSERT_TRUE(merges.ok()) << merges.status();
  }
  EXPECT_GT(read, cases / 20);
}

}  // namespace
}  // namespace muster::text
