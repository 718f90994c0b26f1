#ifndef MUSTER_WORKER_TEXT_BYTE_ALPHABET_H_
#define MUSTER_WORKER_TEXT_BYTE_ALPHABET_H_

#include <array>

namespace muster::text {

// The alphabet in which byte-level vocabularies write bytes: printable ones of Latin-1 as
// themselves, the others as the characters from U+0100 on, in order. A blank is U+0120.
inline constexpr std::array<char32_t, 256> kByteAlphabet = [] {
  std::array<char32_t, 256> alphabet{};
  char32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    alphabet[byte] = printable ? static_cast<char32_t>(byte) : next++;
  }
  return alphabet;
}();

// By character, below kEndOfAlphabet: the byte that it stands for; -1 if it stands for none.
inline constexpr char32_t kEndOfAlphabet = 0x144;
inline constexpr std::array<int, kEndOfAlphabet> kByteOfCharacter = [] {
  std::array<int, kEndOfAlphabet> bytes{};
  for (int& byte : bytes) byte = -1;
  for (int byte = 0; byte < 256; ++byte) bytes[kByteAlphabet[byte]] = byte;
  return bytes;
}();

inline char32_t CharacterOfByte(unsigned char byte) { return kByteAlphabet[byte]; }
inline int ByteOfCharacter(char32_t c) { return c < kEndOfAlphabet ? kByteOfCharacter[c] : -1; }

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_BYTE_ALPHABET_H_
