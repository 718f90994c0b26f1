#include "worker/checkpoint/seal.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/signature.h"
#include "base/test_folder.h"
#include "base/test_keys.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/sealing.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

RegisteredCheckpoint Record() {
  RegisteredCheckpoint record;
  record.job = "job \n\xff";
  record.id = uint64_t{1} << 63;
  record.path = "/c/checkpoint_7";
  record.iteration = 7;
  record.step = 70;
  record.ranks = 2;
  record.plan = 0xabc;
  record.created_us = 1'700'000'000'000'000;
  record.files = 5;
  record.bytes = 1234;
  record.files_sha256 = std::string(64, 'a');
  record.previous_sha256 = "";
  record.sha256 = std::string(64, 'b');
  record.signature = std::string(128, 'c');
  return record;
}

TEST(Seal, WrittenAndRead_IsTheSame) {
  const TestFolder folder;
  const std::string& dir = folder.path();
  ASSERT_TRUE(WriteSeal(dir, Record()).ok());
  const auto read = ReadSeal(dir);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(SealText(*read), SealText(Record()));
  EXPECT_EQ(read->sha256, Record().sha256);
  EXPECT_EQ(read->signature, Record().signature);
  EXPECT_EQ(read->job, Record().job);
}

// Its writer was killed before the rename, and this disk is read-only now.
TEST(Seal, RecordThatLacksOnlyItsName_IsRead) {
  const TestFolder folder;
  const std::string& dir = folder.path();
  ASSERT_TRUE(WriteSeal(dir, Record()).ok());
  ASSERT_EQ(std::rename(folder.Path(kSealName).c_str(), folder.Path(kSealingName).c_str()), 0);
  const auto read = ReadSeal(dir);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->sha256, Record().sha256);
  // There is no record if the seal was only asked for.
  ASSERT_TRUE(BeginSealing(dir, {.job = "j", .id = 1}, 10).ok());
  EXPECT_TRUE(absl::IsNotFound(ReadSeal(dir).status()));
}

TEST(Seal, Text_IsThatOfTheChain) {
  EXPECT_THAT(SealText(Record()),
              HasSubstr("muster checkpoint 1\njob job \\n\\xff\nid 9223372036854775808\n"
                        "path /c/checkpoint_7\niteration 7\nstep 70\nranks 2\n"
                        "plan 0000000000000abc\n"));
}

TEST(Seal, Damaged_IsAnErrorThatNamesTheFile) {
  const TestFolder folder;
  const std::string& dir = folder.path();
  EXPECT_TRUE(absl::IsNotFound(ReadSeal(dir).status()));
  ASSERT_TRUE(WriteSeal(dir, Record()).ok());
  const std::string path = JoinPath(dir, kSealName);
  const std::string whole = *ReadFile(path);
  for (size_t size = 0; size + 2 < whole.size(); ++size) {
    ASSERT_TRUE(WriteFileAtomically(path, whole.substr(0, size)).ok());
    const auto read = ReadSeal(dir);
    ASSERT_FALSE(read.ok()) << size;
    EXPECT_THAT(std::string(read.status().message()), HasSubstr("seal.json"));
  }
}

TEST(Seal, OfEarlierWriters_HasDefaultsForWhatTheyDidNotKnow) {
  const TestFolder folder;
  const std::string path = JoinPath(folder.path(), kSealName);
  RegisteredCheckpoint held_back = Record();
  held_back.promoted = false;
  held_back.pinned = true;
  ASSERT_TRUE(WriteSeal(folder.path(), held_back).ok());
  nlohmann::json json = nlohmann::json::parse(*ReadFile(path));
  const auto read = [&](const nlohmann::json& changed) {
    EXPECT_TRUE(WriteFileAtomically(path, changed.dump()).ok());
    return ReadSeal(folder.path());
  };
  for (const char* field : {"held_back", "pinned"}) {
    nlohmann::json wrong = json;
    wrong[field] = 0;
    EXPECT_TRUE(absl::IsDataLoss(read(wrong).status())) << field;
    nlohmann::json renamed = json;
    renamed.erase(field);
    renamed[std::string(field) + "x"] = true;
    EXPECT_TRUE(absl::IsDataLoss(read(renamed).status())) << field;
  }
  json.erase("pinned");
  const auto second = read(json);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_FALSE(second->promoted);
  EXPECT_FALSE(second->pinned);
  json.erase("held_back");
  const auto first = read(json);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(first->promoted);
  EXPECT_FALSE(first->pinned);
}

TEST(Seal, Errors_SayWhetherTheyStay) {
  const TestFolder folder;
  const std::string path = JoinPath(folder.path(), kSealName);
  const auto error = [&] { return ReadSeal(folder.path()).status(); };
  EXPECT_TRUE(absl::IsNotFound(error()));
  ASSERT_TRUE(WriteFileAtomically(path, "{").ok());
  EXPECT_TRUE(absl::IsDataLoss(error())) << error();
  ASSERT_TRUE(WriteFileAtomically(path, std::string((1 << 20) + 1, ' ')).ok());
  EXPECT_TRUE(absl::IsDataLoss(error())) << error();
  ASSERT_TRUE(WriteFileAtomically(path, R"({"format": "muster-seal", "version": 2})").ok());
  EXPECT_TRUE(absl::IsUnimplemented(error()) && StaysUnreadable(error())) << error();
  ASSERT_EQ(unlink(path.c_str()), 0);
  ASSERT_TRUE(MakeDirectories(path).ok());
  EXPECT_TRUE(absl::IsDataLoss(error()) && StaysUnreadable(error())) << error();
  ASSERT_EQ(rmdir(path.c_str()), 0);
  ASSERT_EQ(symlink(kSealName, path.c_str()), 0);
  EXPECT_FALSE(absl::IsNotFound(error()) || StaysUnreadable(error())) << error();
  // Its disk may not be mounted.
  const std::string link = folder.Path("link");
  ASSERT_EQ(symlink("/missing/checkpoint_4", link.c_str()), 0);
  EXPECT_TRUE(absl::IsUnavailable(ReadSeal(link).status()));
}

std::string Hash(const std::string& bytes) { return absl::BytesToHexString(Sha256(bytes)); }

// A checkpoint of one file, sealed and signed.
class CheckSealTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Staging staging = *Staging::Create(dir_);
    ASSERT_TRUE(WriteFileAtomically(JoinPath(staging.path(), "scaler.json"), "{}").ok());
    Manifest manifest;
    manifest.info.step = 70;
    manifest.info.iteration = 7;
    manifest.files = {{.name = "scaler.json", .rank = 0, .digest = DigestBytes("{}")}};
    ASSERT_TRUE(staging.Publish(manifest).ok());
    manifest_ = *ReadManifest(dir_);
    const FileDigest own = *DigestFile(JoinPath(dir_, kManifestName));
    seal_ = Record();
    lines_ = absl::StrCat("scaler.json\t2\t", DigestBytes("{}").xxh3, "\n");
    SealWith(absl::StrCat("manifest.json\t", own.bytes, "\t", own.xxh3, "\n", lines_));
  }
  void SealWith(const std::string& lines) {
    seal_.files_sha256 = Hash(lines);
    seal_.sha256 = Hash(SealText(seal_));
    seal_.signature = absl::BytesToHexString(
        SigningKey::Parse(kTestPrivateKey, "key")->Sign(absl::HexStringToBytes(seal_.sha256)));
  }
  std::string Problem(const char* key = kTestPublicKey) {
    const VerifyingKey checks = *VerifyingKey::Parse(key, "key");
    const absl::Status status = CheckSeal(dir_, manifest_, seal_, &checks, "public.pem");
    EXPECT_TRUE(status.ok() || absl::IsDataLoss(status)) << status;
    if (!status.ok()) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(dir_));
    }
    return std::string(status.message());
  }

  const TestFolder folder_;
  const std::string dir_ = folder_.Path("checkpoint_7");
  std::string lines_;
  Manifest manifest_;
  RegisteredCheckpoint seal_;
};

TEST_F(CheckSealTest, AsSealed_IsGood) {
  EXPECT_EQ(Problem(), "");
  EXPECT_TRUE(CheckSeal(dir_, manifest_, seal_).ok());
}

TEST_F(CheckSealTest, AnyFlippedBitOfTheFile_IsFound) {
  ASSERT_TRUE(WriteSeal(dir_, seal_).ok());
  const std::string path = JoinPath(dir_, kSealName);
  const std::string whole = *ReadFile(path);
  const OwnedFd file(open(path.c_str(), O_RDWR | O_CLOEXEC));
  const VerifyingKey key = *VerifyingKey::Parse(kTestPublicKey, "key");
  for (size_t bit = 0; bit < whole.size() * 8 && !HasFailure(); ++bit) {
    const char turned = static_cast<char>(whole[bit / 8] ^ (1 << (bit % 8)));
    ASSERT_EQ(pwrite(file.get(), &turned, 1, bit / 8), 1);
    const auto seal = ReadSeal(dir_);
    const absl::Status found =
        seal.ok() ? CheckSeal(dir_, manifest_, *seal, &key, "public.pem") : seal.status();
    EXPECT_THAT(std::string(found.message()), HasSubstr(dir_)) << "bit " << bit;
    ASSERT_EQ(pwrite(file.get(), &whole[bit / 8], 1, bit / 8), 1);
  }
  EXPECT_TRUE(CheckSeal(dir_, manifest_, *ReadSeal(dir_), &key, "public.pem").ok());
}

TEST_F(CheckSealTest, RecordOfAnOlderWorker_NeedNotListTheManifest) {
  SealWith(lines_);
  EXPECT_EQ(Problem(), "");
  // The facts in the record itself match the manifest in any case.
  manifest_.info.step = 71;
  EXPECT_THAT(Problem(), HasSubstr("the manifest was changed"));
}

TEST_F(CheckSealTest, ChangedRecord_NoLongerHasItsHash) {
  seal_.step = 71;
  EXPECT_THAT(Problem(), HasSubstr("seal.json was changed"));
}

TEST_F(CheckSealTest, ChangedRecordWithANewHash_IsNotSigned) {
  seal_.created_us += 1;
  seal_.sha256 = Hash(SealText(seal_));
  EXPECT_TRUE(CheckSeal(dir_, manifest_, seal_).ok());
  EXPECT_THAT(Problem(), HasSubstr("is not signed by the key of public.pem"));
}

TEST_F(CheckSealTest, AnotherManifest_IsNotTheOneThatWasSealed) {
  Manifest other = manifest_;
  other.info.cursor["first_epoch"] = 9;
  ASSERT_TRUE(WriteFileAtomically(JoinPath(dir_, kManifestName), *EncodeManifest(other)).ok());
  manifest_ = *ReadManifest(dir_);
  EXPECT_THAT(Problem(), HasSubstr("the manifest was changed"));
}

TEST_F(CheckSealTest, UnsignedOrOfAnotherKey_SaysWhich) {
  EXPECT_THAT(Problem(kOtherTestPublicKey), HasSubstr("is not signed by the key of public.pem"));
  seal_.signature = "";
  EXPECT_THAT(Problem(), HasSubstr("is not signed: the coordinator that sealed it had no key"));
  EXPECT_TRUE(CheckSeal(dir_, manifest_, seal_).ok());
}

TEST_F(CheckSealTest, UnderTheNumberOfAnother_IsFound) {
  const VerifyingKey key = *VerifyingKey::Parse(kTestPublicKey, "key");
  const auto moved_to = [&](const char* name) {
    const std::string dir = folder_.Path(name);
    EXPECT_EQ(rename(dir_.c_str(), dir.c_str()), 0);
    const absl::Status status = CheckSeal(dir, manifest_, seal_, &key, "public.pem");
    EXPECT_EQ(rename(dir.c_str(), dir_.c_str()), 0);
    return status;
  };
  const absl::Status replayed = moved_to("checkpoint_8");
  EXPECT_TRUE(absl::IsDataLoss(replayed)) << replayed;
  EXPECT_THAT(std::string(replayed.message()),
              HasSubstr("checkpoint_8 has the name of another checkpoint: its contents were sealed "
                        "and signed as /c/checkpoint_7 (step 70)"));
  const absl::Status renamed = moved_to("best");
  EXPECT_TRUE(renamed.ok()) << renamed;
}

}  // namespace
}  // namespace muster
