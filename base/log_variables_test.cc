#include "base/log_variables.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(CheckLogVariables, WhatTheLogKnows_IsAccepted) {
  EXPECT_TRUE(CheckLogVariables({}).ok());
  EXPECT_TRUE(CheckLogVariables({{"MUSTER_LOG_LEVEL", ""}, {"MUSTER_LOG_FORMAT", ""}}).ok());
  for (const char* const level : {"debug", "Info", "warn", "warning", "ERROR"}) {
    EXPECT_TRUE(CheckLogVariables({{"MUSTER_LOG_LEVEL", level}}).ok()) << level;
  }
  for (const char* const format : {"text", "json"}) {
    EXPECT_TRUE(CheckLogVariables({{"MUSTER_LOG_FORMAT", format}}).ok()) << format;
  }
}

TEST(CheckLogVariables, WhatTheLogDoesNotKnow_IsRefused) {
  EXPECT_EQ(CheckLogVariables({{"MUSTER_LOG_LEVEL", "verbose"}}),
            absl::InvalidArgumentError(
                "MUSTER_LOG_LEVEL='verbose' is not one of debug, info, warning, error"));
  for (const char* const format : {"xml", "JSON"}) {
    EXPECT_EQ(CheckLogVariables({{"MUSTER_LOG_FORMAT", format}}),
              absl::InvalidArgumentError(std::string("MUSTER_LOG_FORMAT='") + format +
                                         "' is not one of text, json"));
  }
}

}  // namespace
}  // namespace muster
