#include "base/signature.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "absl/strings/escaping.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "base/test_keys.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

// Made with the keys of base/test_keys.h, from the same source.
constexpr char kSignatureOf72[] =
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00";

// RFC 4231, test case 2.
TEST(SignatureTest, Hmac_IsThatOfTheStandard) {
  EXPECT_EQ(absl::BytesToHexString(HmacSha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_NE(HmacSha256("Jefe", "a"), HmacSha256("Jefe", "b"));
  EXPECT_NE(HmacSha256("k", "a"), HmacSha256("l", "a"));
}

TEST(Signature, OfTheStandardsKeyAndMessage_IsTheStandards) {
  const auto key = SigningKey::Parse(kTestPrivateKey, "key");
  ASSERT_TRUE(key.ok()) << key.status();
  EXPECT_EQ(absl::BytesToHexString(key->Sign("\x72")), kSignatureOf72);
  const auto checks = VerifyingKey::Parse(kTestPublicKey, "public key");
  ASSERT_TRUE(checks.ok()) << checks.status();
  EXPECT_TRUE(checks->Verifies("\x72", absl::HexStringToBytes(kSignatureOf72)));
}

TEST(Signature, OfAnotherMessageOrChanged_DoesNotVerify) {
  const auto key = SigningKey::Parse(kTestPrivateKey, "key");
  const auto checks = VerifyingKey::Parse(kTestPublicKey, "public key");
  ASSERT_TRUE(key.ok() && checks.ok());
  const std::string digest = Sha256("a record");
  const std::string signature = key->Sign(digest);
  EXPECT_TRUE(checks->Verifies(digest, signature));
  EXPECT_FALSE(checks->Verifies(Sha256("another record"), signature));
  EXPECT_FALSE(checks->Verifies(digest, ""));
  EXPECT_FALSE(checks->Verifies(digest, signature.substr(1)));
  for (size_t bit = 0; bit < 8 * signature.size(); ++bit) {
    std::string changed = signature;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_FALSE(checks->Verifies(digest, changed)) << bit;
  }
}

TEST(Signature, KeysOfOpenssl_SignForEachOther) {
  const TestFolder folder;
  const std::string& dir = folder.path();
  const std::string make = "cd " + dir +
                           " && openssl genpkey -algorithm ed25519 -out key.pem"
                           " && openssl pkey -in key.pem -pubout -out public.pem";
  ASSERT_EQ(std::system(make.c_str()), 0);
  const auto key = SigningKey::Parse(*ReadFile(dir + "/key.pem"), "key.pem");
  ASSERT_TRUE(key.ok()) << key.status();
  ASSERT_TRUE(WriteFileAtomically(dir + "/record", "a record").ok());
  ASSERT_TRUE(WriteFileAtomically(dir + "/signature", key->Sign("a record")).ok());
  const std::string check = "cd " + dir +
                            " && openssl pkeyutl -verify -pubin -inkey public.pem -rawin -in "
                            "record -sigfile signature >/dev/null";
  EXPECT_EQ(std::system(check.c_str()), 0);
  const auto other = VerifyingKey::Parse(kTestPublicKey, "public key");
  EXPECT_FALSE(other->Verifies("a record", key->Sign("a record")));
}

TEST(Signature, FileThatIsNoSuchKey_IsRefusedWithTheRemedy) {
  const TestFolder folder;
  const std::string& dir = folder.path();
  const std::string make = "cd " + dir +
                           " && openssl genpkey -algorithm x25519 -out x.pem"
                           " && openssl genpkey -algorithm ed25519 -aes256 -pass pass:secret"
                           " -out encrypted.pem";
  ASSERT_EQ(std::system(make.c_str()), 0);
  for (const std::string& pem :
       {std::string(), std::string("nonsense"), std::string(kTestPublicKey),
        *ReadFile(dir + "/x.pem"), *ReadFile(dir + "/encrypted.pem")}) {
    const auto key = SigningKey::Parse(pem, "--checkpoint_key 'f'");
    ASSERT_TRUE(absl::IsInvalidArgument(key.status()));
    EXPECT_THAT(std::string(key.status().message()),
                HasSubstr("--checkpoint_key 'f' holds no private Ed25519 key"));
  }
  EXPECT_THAT(std::string(VerifyingKey::Parse(kTestPrivateKey, "f").status().message()),
              HasSubstr("f holds the private key"));
  EXPECT_THAT(std::string(VerifyingKey::Parse("x", "f").status().message()),
              HasSubstr("f holds no public Ed25519 key"));
}

}  // namespace
}  // namespace muster
