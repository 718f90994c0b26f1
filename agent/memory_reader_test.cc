#include "agent/memory_reader.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

namespace muster::agent {
namespace {

TEST(ProcessMemory, WhatIsThere_IsRead) {
  const ProcessMemory memory(getpid());
  const std::string text = "of this process";
  std::string copy(text.size(), ' ');
  ASSERT_TRUE(memory.Read(reinterpret_cast<uint64_t>(text.data()), copy.data(), copy.size()));
  EXPECT_EQ(copy, text);
  const uint32_t number = 77;
  uint32_t read = 0;
  ASSERT_TRUE(memory.ReadValue(reinterpret_cast<uint64_t>(&number), &read));
  EXPECT_EQ(read, 77u);
}

TEST(ProcessMemory, WhatIsNotAllThere_IsNotRead) {
  const ProcessMemory memory(getpid());
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  char* const pages = static_cast<char*>(
      mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  ASSERT_NE(pages, MAP_FAILED);
  ASSERT_EQ(munmap(pages + page, page), 0);
  uint64_t value = 7;
  EXPECT_TRUE(memory.ReadValue(reinterpret_cast<uint64_t>(pages + page - sizeof(value)), &value));
  EXPECT_FALSE(memory.ReadValue(reinterpret_cast<uint64_t>(pages + page - 1), &value));
  EXPECT_FALSE(memory.ReadValue(reinterpret_cast<uint64_t>(pages + page), &value));
  EXPECT_FALSE(memory.ReadValue(0, &value));
  EXPECT_FALSE(memory.ReadValue(~uint64_t{0} - 3, &value));
  munmap(pages, page);
}

TEST(ProcessMemory, ProcessThatIsGone_HasNone) {
  const pid_t pid = fork();
  if (pid == 0) _exit(0);
  ASSERT_EQ(waitpid(pid, nullptr, 0), pid);
  const ProcessMemory memory(pid);
  int value = 0;
  EXPECT_FALSE(memory.ReadValue(reinterpret_cast<uint64_t>(&value), &value));
}

}  // namespace
}  // namespace muster::agent
