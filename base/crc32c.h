#ifndef MUSTER_BASE_CRC32C_H_
#define MUSTER_BASE_CRC32C_H_

#include <cstdint>

#include "absl/strings/string_view.h"

namespace muster {

// Returns the CRC-32C (Castagnoli, polynomial 0x1EDC6F41 reflected), as in RFC 3720.
// Crc32c("123456789") is 0xE3069283. Uses the SSE4.2 instruction if the processor has it. Pure and
// thread-safe.
uint32_t Crc32c(absl::string_view bytes);

// Returns the CRC of a + b, where `crc` is the CRC of a and `bytes` is b.
uint32_t ExtendCrc32c(uint32_t crc, absl::string_view bytes);

// The CRC as TFRecord files store it: rotated and offset, so that a CRC of data that holds CRCs
// stays strong.
uint32_t MaskedCrc32c(absl::string_view bytes);

}  // namespace muster

#endif  // MUSTER_BASE_CRC32C_H_
