#include "worker/text/unicode.h"

#include <unicode/uchar.h>
#include <unicode/unorm2.h>
#include <unicode/uscript.h>
#include <unicode/ustring.h>
#include <unicode/utf16.h>

#include <bitset>

#include "base/text.h"

namespace muster::text {
namespace {

// The tables of normalization and of marks in the tokenizers library are those of Unicode 9.
bool InUnicode9(char32_t c) {
  UVersionInfo age;
  u_charAge(static_cast<UChar32>(c), age);
  return age[0] != 0 && age[0] <= 9;
}

// The tables of categories (unicode_categories) are those of Unicode 8.
bool InUnicode8(char32_t c) {
  UVersionInfo age;
  u_charAge(static_cast<UChar32>(c), age);
  return age[0] != 0 && age[0] <= 8;
}

const UNormalizer2* Nfc() {
  static const UNormalizer2* const nfc = [] {
    UErrorCode error = U_ZERO_ERROR;
    return unorm2_getNFCInstance(&error);
  }();
  return nfc;
}

const UNormalizer2* Nfkc() {
  static const UNormalizer2* const nfkc = [] {
    UErrorCode error = U_ZERO_ERROR;
    return unorm2_getNFKCInstance(&error);
  }();
  return nfkc;
}

uint32_t CategoryMask(char32_t c) { return U_GET_GC_MASK(static_cast<UChar32>(c)); }

// Returns how many bytes of the maximal ill-formed part or, if `cut` is set, of the start of a
// character are at the front of `bytes`, which does not begin with a complete character.
size_t IllFormedBytes(absl::string_view bytes, bool* cut) {
  *cut = false;
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(bytes[i]); };
  const unsigned char first = byte(0);
  size_t wanted = 0;
  unsigned char low = 0x80;
  unsigned char high = 0xBF;
  if (first >= 0xC2 && first <= 0xDF) {
    wanted = 2;
  } else if (first >= 0xE0 && first <= 0xEF) {
    wanted = 3;
    if (first == 0xE0) low = 0xA0;
    if (first == 0xED) high = 0x9F;
  } else if (first >= 0xF0 && first <= 0xF4) {
    wanted = 4;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;
  } else {
    return 1;
  }
  size_t found = 1;
  while (found < wanted && found < bytes.size()) {
    if (byte(found) < low || byte(found) > high) return found;
    low = 0x80;
    high = 0xBF;
    ++found;
  }
  *cut = found < wanted;
  return found;
}

bool ComputeInert(char32_t c, bool composition_only) {
  if (c < 0x80) return true;
  const auto u = static_cast<UChar32>(c);
  if (u_getIntPropertyValue(u, UCHAR_NFC_QUICK_CHECK) != UNORM_YES) return false;
  if (u_getCombiningClass(u) != 0) return false;
  if (composition_only) return true;
  return u_getIntPropertyValue(u, UCHAR_NFKD_QUICK_CHECK) == UNORM_YES &&
         u_getIntPropertyValue(u, UCHAR_NFKC_QUICK_CHECK) == UNORM_YES;
}

using Plane = std::bitset<0x10000>;

const Plane& InertPlane(bool composition_only) {
  const auto make = [](bool only) {
    auto* plane = new Plane;
    for (char32_t c = 0; c < 0x10000; ++c) (*plane)[c] = ComputeInert(c, only);
    return plane;
  };
  static const Plane* const composition = make(true);
  static const Plane* const all = make(false);
  return composition_only ? *composition : *all;
}

}  // namespace

size_t CountCharacters(absl::string_view text) {
  size_t count = 0;
  for (const char c : text) count += (static_cast<unsigned char>(c) & 0xC0) != 0x80 ? 1 : 0;
  return count;
}

void AppendUtf8Lossy(std::string& out, std::string& pending, absl::string_view bytes, bool final) {
  std::string joined;
  if (!pending.empty()) {
    joined = std::move(pending);
    joined.append(bytes.data(), bytes.size());
    bytes = joined;
  }
  pending.clear();
  while (!bytes.empty()) {
    if (const size_t whole = Utf8CharacterBytes(bytes); whole > 0) {
      out.append(bytes.data(), whole);
      bytes.remove_prefix(whole);
      continue;
    }
    bool cut = false;
    const size_t wrong = IllFormedBytes(bytes, &cut);
    if (cut && !final) {
      pending.assign(bytes.data(), bytes.size());
      return;
    }
    out += "\xEF\xBF\xBD";
    bytes.remove_prefix(wrong);
  }
}

bool IsWhitespace(char32_t c) {
  if (c < 0x80) return c == ' ' || (c >= 0x09 && c <= 0x0D);
  return u_hasBinaryProperty(static_cast<UChar32>(c), UCHAR_WHITE_SPACE);
}

bool IsNumeric(char32_t c) { return (CategoryMask(c) & U_GC_N_MASK) != 0; }

bool IsPunctuation(char32_t c) {
  if (c < 0x80) return u_isgraph(static_cast<UChar32>(c)) && !u_isalnum(static_cast<UChar32>(c));
  if (c == 0x166D) return true;   // a symbol since Unicode 12
  if (c == 0x111C9) return true;  // a mark since Unicode 11
  return (CategoryMask(c) & U_GC_P_MASK) != 0 && InUnicode8(c);
}

bool IsControl(char32_t c) {
  return (CategoryMask(c) & (U_GC_CC_MASK | U_GC_CF_MASK | U_GC_CO_MASK)) != 0 && InUnicode8(c);
}

// The characters named in these two have changed their category since Unicode 8 and 9.
bool IsMark(char32_t c) {
  if (c < 0x300) return false;
  if (c == 0x1CF2 || c == 0x1CF3) return true;
  return (CategoryMask(c) & U_GC_M_MASK) != 0 && c != 0x111C9 && InUnicode9(c);
}

bool IsNonspacingMark(char32_t c) {
  if (c < 0x300) return false;
  if (c == 0x1734) return true;
  return (CategoryMask(c) & U_GC_MN_MASK) != 0 && c != 0x1885 && c != 0x1886 && c != 0xA9BD &&
         c != 0x111C9 && InUnicode8(c);
}

bool IsWord(char32_t c) {
  return (CategoryMask(c) & (U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK)) != 0 ||
         u_hasBinaryProperty(static_cast<UChar32>(c), UCHAR_ALPHABETIC) || c == 0x200C ||
         c == 0x200D;
}

bool IsLetter(char32_t c) { return (CategoryMask(c) & U_GC_L_MASK) != 0; }

int ScriptOf(char32_t c) {
  if (c == ' ') return 0;
  if (c == 0x30FC) return USCRIPT_HAN + 1;
  if (!InUnicode9(c)) return 0;
  // These belong to no single script in Unicode 9, whose scripts these are.
  if (c == 0x589 || c == 0x61C) return USCRIPT_COMMON + 1;
  UErrorCode error = U_ZERO_ERROR;
  const UScriptCode script = uscript_getScript(static_cast<UChar32>(c), &error);
  if (U_FAILURE(error) || script == USCRIPT_UNKNOWN) return 0;
  if (script == USCRIPT_HIRAGANA || script == USCRIPT_KATAKANA) return USCRIPT_HAN + 1;
  return script + 1;
}

Characters Lowercase(char32_t c) {
  if (c < 0x80) return {c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c};
  // The only character whose lower case without conditions is two.
  if (c == 0x130) return {'i', 0x307};
  return {static_cast<char32_t>(u_tolower(static_cast<UChar32>(c)))};
}

Characters Decompose(char32_t c, bool compatibility) {
  if (c < 0x80) return {c};
  UChar units[64];
  UErrorCode error = U_ZERO_ERROR;
  const int32_t length =
      unorm2_getDecomposition(compatibility ? Nfkc() : Nfc(), static_cast<UChar32>(c), units,
                              static_cast<int32_t>(std::size(units)), &error);
  if (length < 0 || U_FAILURE(error) || !InUnicode9(c)) return {c};
  Characters characters;
  for (int32_t at = 0; at < length;) {
    UChar32 next;
    U16_NEXT(units, at, length, next);
    characters.push_back(static_cast<char32_t>(next));
  }
  return characters;
}

int CombiningClass(char32_t c) {
  if (c < 0x300) return 0;
  const int combining_class = u_getCombiningClass(static_cast<UChar32>(c));
  return combining_class != 0 && InUnicode9(c) ? combining_class : 0;
}

char32_t Compose(char32_t a, char32_t b) {
  const UChar32 composed =
      unorm2_composePair(Nfc(), static_cast<UChar32>(a), static_cast<UChar32>(b));
  return composed >= 0 && InUnicode9(static_cast<char32_t>(composed))
             ? static_cast<char32_t>(composed)
             : 0;
}

bool IsInertInNormalization(char32_t c) {
  return c < 0x10000 ? InertPlane(false)[c] : ComputeInert(c, false);
}

bool IsInertInComposition(char32_t c) {
  return c < 0x10000 ? InertPlane(true)[c] : ComputeInert(c, true);
}

}  // namespace muster::text
