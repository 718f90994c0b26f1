#include "worker/checkpoint/disposal.h"

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(DisposalTest, Remove_ReturnsBeforeTheFolderIsGone_AndWaitAfterwards) {
  Notification go;
  std::vector<std::string> removed;
  Disposal disposal([&](const std::string& path) {
    go.WaitForNotification();
    removed.push_back(path);
    return absl::OkStatus();
  });
  disposal.Remove("a");
  disposal.Remove("b");
  EXPECT_TRUE(disposal.busy());
  go.Notify();
  disposal.Wait();
  EXPECT_FALSE(disposal.busy());
  EXPECT_EQ(removed, (std::vector<std::string>{"a", "b"}));
}

TEST(DisposalTest, End_WaitsForWhatIsQueued) {
  int removed = 0;
  auto disposal = std::make_unique<Disposal>([&](const std::string&) {
    ++removed;
    return absl::OkStatus();
  });
  for (int i = 0; i < 3; ++i) disposal->Remove("folder");
  disposal.reset();
  EXPECT_EQ(removed, 3);
}

TEST(DisposalTest, FolderThatCannotBeRemoved_DoesNotKeepTheNextOne) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("old/deep")).ok());
  Disposal disposal([](const std::string& path) {
    return path == "busy" ? absl::UnavailableError("cannot remove busy") : RemoveTree(path);
  });
  disposal.Remove("busy");
  disposal.Remove(folder.Path("old"));
  disposal.Wait();
  EXPECT_FALSE(PathExists(folder.Path("old")));
}

TEST(DisposalTest, Memory_IsFreedBesideItsOwner) {
  Notification go;
  std::thread::id freed_by;
  std::shared_ptr<const int> memory(new int(3), [&](const int* number) {
    go.WaitForNotification();
    freed_by = std::this_thread::get_id();
    delete number;
  });
  const std::weak_ptr<const int> left = memory;
  Disposal disposal;
  disposal.Free(std::move(memory));
  EXPECT_TRUE(disposal.busy());
  go.Notify();
  disposal.Wait();
  EXPECT_TRUE(left.expired());
  EXPECT_NE(freed_by, std::thread::id());
  EXPECT_NE(freed_by, std::this_thread::get_id());
}

TEST(DisposalTest, NothingToDo_IsNotWaitedFor) {
  Disposal disposal;
  disposal.Wait();
}

}  // namespace
}  // namespace muster
