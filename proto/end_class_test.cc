#include "proto/end_class.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(EndClassTest, NameOfAClass_IsReadAsWritten) {
  EXPECT_EQ(EndClassName(v1::END_CLASS_OUT_OF_MEMORY), "OUT_OF_MEMORY");
  for (int number = v1::EndClass_MIN; number <= v1::EndClass_MAX; ++number) {
    if (!v1::EndClass_IsValid(number)) continue;
    const auto end_class = static_cast<v1::EndClass>(number);
    EXPECT_EQ(EndClassOfName(EndClassName(end_class)), end_class) << number;
  }
  EXPECT_EQ(EndClassName(static_cast<v1::EndClass>(1000)), "UNKNOWN");
  for (const char* const none : {"", "UNKNOWN", "oom", "END_CLASS_HANG"}) {
    EXPECT_EQ(EndClassOfName(none), v1::END_CLASS_UNSPECIFIED) << none;
  }
}

}  // namespace
}  // namespace muster
