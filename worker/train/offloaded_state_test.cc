#include "worker/train/offloaded_state.h"

#include <errno.h>

#include <memory>
#include <string>
#include <vector>

#include "ATen/ops/full_like.h"
#include "ATen/ops/zeros.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/test_error.h"
#include "worker/parallel/paged_storage.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr uint64_t kWindow = 3 * 4096;

// Seven parameters of two states each, of one window of their own or several in one.
std::vector<at::Tensor> Likes() {
  std::vector<at::Tensor> likes;
  for (const int64_t size : {600, 600, 0, 5000, 3, 1000, 700}) {
    likes.push_back(at::zeros({size}));
  }
  return likes;
}

class OffloadedStateTest : public testing::Test {
 protected:
  std::shared_ptr<ScratchFile> File() {
    absl::StatusOr<std::shared_ptr<ScratchFile>> file =
        ScratchFile::Create(folder_.Path("state"), &system_);
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }

  static float ValueOf(size_t i, size_t slot, int step) {
    return static_cast<float>(1000 * step + 10 * i + slot);
  }

  // Sets all states to those of `step`, after it has found those of the step before.
  static void Step(OffloadedState& state, int step) {
    const auto all = [](size_t) { return true; };
    size_t seen = 0;
    state.ForWindows(0, Likes().size(), all, [&](size_t first, size_t last) {
      EXPECT_EQ(first, seen);
      seen = last;
      for (size_t i = first; i < last; ++i) {
        for (size_t s = 0; s < 2; ++s) {
          at::Tensor slot = state.Slot(i, s);
          EXPECT_EQ(slot.numel(), Likes()[i].numel());
          if (step > 0) {
            EXPECT_TRUE(slot.eq(ValueOf(i, s, step - 1)).all().item<bool>()) << i;
          }
          slot.fill_(ValueOf(i, s, step));
        }
      }
    });
    EXPECT_EQ(seen, Likes().size());
  }

  TestFolder folder_;
  DirectFileSystem system_;
};

TEST_F(OffloadedStateTest, States_AreThereInTheNextStep) {
  for (const bool on_disk : {true, false}) {
    OffloadedState state(on_disk ? File() : nullptr, kWindow);
    EXPECT_FALSE(state.Has(0));
    state.Add(0, Likes(), 2);
    EXPECT_TRUE(state.Has(6));
    EXPECT_FALSE(state.Has(7));
    for (int step = 0; step < 4; ++step) Step(state, step);
  }
}

TEST_F(OffloadedStateTest, Mapped_IsTheStateOfTheLastStep) {
  for (const bool on_disk : {true, false}) {
    OffloadedState state(on_disk ? File() : nullptr, kWindow);
    state.Add(0, Likes(), 2);
    for (int step = 0; step < 3; ++step) {
      Step(state, step);
      OffloadedState::Maps maps;
      for (size_t i = 0; i < Likes().size(); ++i) {
        for (size_t s = 0; s < 2; ++s) {
          EXPECT_TRUE(
              state.Mapped(i, s, &maps).equal(at::full_like(Likes()[i], ValueOf(i, s, step))))
              << i;
        }
      }
    }
  }
}

struct PageInMemory : Page {
  void Require(bool, const char*) override {}
};

TEST_F(OffloadedStateTest, ParametersOfOnePage_ShareAWindow) {
  PageInMemory page;
  const at::Tensor first = at::zeros({20}), second = at::zeros({20});
  const PageRegistration of_first(first, &page), of_second(second, &page);
  OffloadedState state(File());
  state.Add(0,
            {PagedView(first, {5}, {1}, 0), PagedView(first, {15}, {1}, 5),
             PagedView(second, {20}, {1}, 0), at::zeros({3}), at::zeros({4})},
            1);
  std::vector<std::pair<size_t, size_t>> seen;
  state.ForWindows(
      0, 5, [](size_t) { return true; },
      [&](size_t begin, size_t end) { seen.emplace_back(begin, end); });
  EXPECT_THAT(seen, ElementsAre(Pair(0, 2), Pair(2, 5)));
}

TEST_F(OffloadedStateTest, WindowsOfOnePage_ComeAfterEachOther) {
  PageInMemory page;
  const at::Tensor first = at::zeros({20}), second = at::zeros({20});
  const PageRegistration of_first(first, &page), of_second(second, &page);
  OffloadedState state(File());
  // Two groups with parameters in both pages, and one without pages.
  state.Add(0, {PagedView(first, {5}, {1}, 0), PagedView(second, {5}, {1}, 0)}, 1);
  state.Add(2, {at::zeros({3})}, 1);
  state.Add(3, {PagedView(first, {15}, {1}, 5), PagedView(second, {15}, {1}, 5)}, 1);
  std::vector<size_t> seen;
  state.ForWindows(
      0, 5, [](size_t) { return true; }, [&](size_t begin, size_t) { seen.push_back(begin); });
  EXPECT_THAT(seen, ElementsAre(0, 3, 1, 4, 2));
}

TEST_F(OffloadedStateTest, WindowsThatNobodyWants_AreLeftOut) {
  OffloadedState state(File(), kWindow);
  state.Add(0, Likes(), 2);
  Step(state, 0);
  std::vector<std::pair<size_t, size_t>> seen;
  state.ForWindows(
      0, 7, [](size_t i) { return i == 3 || i == 6; },
      [&](size_t first, size_t last) { seen.emplace_back(first, last); });
  // 600, 600 and 0 are 9,600 bytes; 5,000 is too large for any window and has its own.
  EXPECT_THAT(seen, ElementsAre(Pair(3, 4), Pair(6, 7)));
  OffloadedState::Maps maps;
  EXPECT_EQ(state.Mapped(5, 1, &maps)[999].item<float>(), ValueOf(5, 1, 0));
}

TEST_F(OffloadedStateTest, ParametersAddedLater_HaveWindowsOfTheirOwn) {
  OffloadedState state(File(), kWindow);
  state.Add(0, Likes(), 2);
  Step(state, 0);
  state.Add(7, {at::zeros({4, 4}).t()}, 1);
  state.ForWindows(
      7, 8, [](size_t) { return true; },
      [&](size_t first, size_t last) {
        EXPECT_EQ(last - first, 1u);
        EXPECT_EQ(state.Slot(7, 0).strides(), at::IntArrayRef({1, 4}));
        state.Slot(7, 0).fill_(7);
      });
  Step(state, 1);
  OffloadedState::Maps maps;
  EXPECT_TRUE(state.Mapped(7, 0, &maps).eq(7).all().item<bool>());
}

TEST_F(OffloadedStateTest, DiskThatFails_LosesTheStateAloud) {
  OffloadedState state(File(), kWindow);
  state.Add(0, Likes(), 2);
  Step(state, 0);
  for (const bool reads : {true, false}) {
    int calls = 0;
    const auto fails = [&] {
      errno = EIO;
      return ++calls == 2;
    };
    if (reads) {
      system_.pread = [&](int fd, void* to, size_t size, off_t at) -> ssize_t {
        return fails() ? -1 : ::pread(fd, to, size, at);
      };
    } else {
      system_.pwrite = [&](int fd, const void* from, size_t size, off_t at) -> ssize_t {
        return fails() ? -1 : ::pwrite(fd, from, size, at);
      };
    }
    const auto step = [&] {
      state.ForWindows(
          0, 7, [](size_t) { return true; }, [](size_t, size_t) {});
    };
    EXPECT_THAT(ErrorOf(step), HasSubstr(folder_.Path("state")));
    system_.pread = ::pread;
    system_.pwrite = ::pwrite;
    EXPECT_THAT(ErrorOf(step), HasSubstr("state was lost"));
    state.Renew();
    Step(state, 0);
  }
}

TEST_F(OffloadedStateTest, UpdateThatThrows_EndsTheTransfersAndLosesTheStateAloud) {
  OffloadedState state(File(), kWindow);
  state.Add(0, Likes(), 2);
  const auto all = [](size_t) { return true; };
  EXPECT_THAT(ErrorOf([&] {
                state.ForWindows(
                    0, 7, all, [](size_t first, size_t) { TORCH_CHECK(first == 0, "no kernel"); });
              }),
              HasSubstr("no kernel"));
  EXPECT_THAT(ErrorOf([&] { state.ForWindows(0, 7, all, [](size_t, size_t) {}); }),
              HasSubstr("state was lost"));
}

TEST_F(OffloadedStateTest, FullDisk_IsRefusedWithNothingChanged) {
  OffloadedState state(File(), kWindow);
  system_.allocate = [](int, off_t) {
    errno = ENOSPC;
    return -1;
  };
  EXPECT_THAT(ErrorOf([&] { state.Add(0, Likes(), 2); }), HasSubstr("cannot reserve"));
  EXPECT_FALSE(state.Has(0));
}

}  // namespace
}  // namespace muster
