#ifndef MUSTER_WORKER_NESTED_AGGREGATE_H_
#define MUSTER_WORKER_NESTED_AGGREGATE_H_

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

namespace muster {

// Access to the members of a plain struct without listing them. IsDecomposable<T> holds for a
// copyable aggregate with 1 to 16 members, no base class, and no reference or C array among its
// members; MembersOf(value) gives const references to the members in the order of declaration.
// Everything else needs MusterFields (nested.h). Bit-fields are not recognized and do not compile.

namespace aggregate_internal {

constexpr size_t kMaxMembers = 16;

// Converts to any type except T and its bases, so that T{AnyMember<T>()} neither copies a T nor
// fills a base class.
template <class T>
struct AnyMember {
  template <class U>
  requires(!std::is_base_of_v<U, T>) operator U() const noexcept;
};
template <class T>
struct AnyBase {
  template <class U>
  requires(std::is_base_of_v<U, T> && !std::is_same_v<U, T>) operator U() const noexcept;
};
template <class T, size_t>
using MemberAt = AnyMember<T>;

template <class T, class... Inits>
concept BracesTake = requires {
  T{Inits()...};
};

template <class T, size_t... I>
constexpr bool Takes(std::index_sequence<I...>) {
  return BracesTake<T, MemberAt<T, I>...>;
}

// The largest number of initializers that T takes: its members, with the elements of C arrays
// counted one by one. More than kMaxMembers: too many.
template <class T, size_t N>
constexpr size_t CountInitialisers() {
  if constexpr (N == 0) {
    return 0;
  } else if constexpr (Takes<T>(std::make_index_sequence<N>())) {
    return N;
  } else {
    return CountInitialisers<T, N - 1>();
  }
}

// Whether T's member at I can be initialized with braces, followed by initializers for `After`
// more.
template <class T, size_t... Before, size_t... After>
constexpr bool TakesEmptyBraces(std::index_sequence<Before...>, std::index_sequence<After...>) {
  return requires { T{MemberAt<T, Before>()..., {}, MemberAt<T, After>()...}; };
}
template <class T, size_t... Before, size_t... After>
constexpr bool TakesBraces(std::index_sequence<Before...>, std::index_sequence<After...>) {
  return requires { T{MemberAt<T, Before>()..., {AnyMember<T>()}, MemberAt<T, After>()...}; };
}
template <class T, size_t I, size_t... After>
constexpr bool TakesBracesAndFewer(std::index_sequence<After...>) {
  return (TakesBraces<T>(std::make_index_sequence<I>(), std::make_index_sequence<After>()) || ... ||
          false);
}

// Whether the initializer at I of `N` fills one whole member. If it begins a C array, braces in its
// place fill the whole array, so that fewer initializers fit after them.
template <class T, size_t N, size_t I>
constexpr bool IsOneMember() {
  constexpr std::make_index_sequence<I> kBefore;
  constexpr std::make_index_sequence<N - 1 - I> kAfter;
  return TakesEmptyBraces<T>(kBefore, kAfter) || TakesBraces<T>(kBefore, kAfter) ||
         !TakesBracesAndFewer<T, I>(kAfter);
}
template <class T, size_t N, size_t... I>
constexpr bool AreWholeMembers(std::index_sequence<I...>) {
  return (IsOneMember<T, N, I>() && ...);
}

template <class T, size_t... I>
constexpr bool HasBase(std::index_sequence<I...>) {
  return BracesTake<T, AnyBase<T>> || BracesTake<T, AnyBase<T>, MemberAt<T, I>...>;
}

template <size_t N, class T>
constexpr auto Tie(const T& value) {
  if constexpr (N == 1) {
    const auto& [a] = value;
    return std::tie(a);
  } else if constexpr (N == 2) {
    const auto& [a, b] = value;
    return std::tie(a, b);
  } else if constexpr (N == 3) {
    const auto& [a, b, c] = value;
    return std::tie(a, b, c);
  } else if constexpr (N == 4) {
    const auto& [a, b, c, d] = value;
    return std::tie(a, b, c, d);
  } else if constexpr (N == 5) {
    const auto& [a, b, c, d, e] = value;
    return std::tie(a, b, c, d, e);
  } else if constexpr (N == 6) {
    const auto& [a, b, c, d, e, f] = value;
    return std::tie(a, b, c, d, e, f);
  } else if constexpr (N == 7) {
    const auto& [a, b, c, d, e, f, g] = value;
    return std::tie(a, b, c, d, e, f, g);
  } else if constexpr (N == 8) {
    const auto& [a, b, c, d, e, f, g, h] = value;
    return std::tie(a, b, c, d, e, f, g, h);
  } else if constexpr (N == 9) {
    const auto& [a, b, c, d, e, f, g, h, i] = value;
    return std::tie(a, b, c, d, e, f, g, h, i);
  } else if constexpr (N == 10) {
    const auto& [a, b, c, d, e, f, g, h, i, j] = value;
    return std::tie(a, b, c, d, e, f, g, h, i, j);
  } else if constexpr (N == 11) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k] = value;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k);
  } else if constexpr (N == 12) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l] = value;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l);
  } else if constexpr (N == 13) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m] = value;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m);
  } else if constexpr (N == 14) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n] = value;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n);
  } else if constexpr (N == 15) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o] = value;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o);
  } else if constexpr (N == 16) {
    const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = value;
    return std::tie(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p);
  }
}

// References would dangle in a new T, and C arrays cannot be copied into one.
template <class Member>
inline constexpr bool kIsUnfit = std::is_reference_v<Member> || std::is_array_v<Member>;

// A std::bool_constant.
template <size_t N, class T>
auto HasUnfitMember(const T& value) {
  if constexpr (N == 1) {
    [[maybe_unused]] const auto& [a] = value;
    return std::bool_constant<(kIsUnfit<decltype(a)>)>();
  } else if constexpr (N == 2) {
    [[maybe_unused]] const auto& [a, b] = value;
    return std::bool_constant<(kIsUnfit<decltype(a)> || kIsUnfit<decltype(b)>)>();
  } else if constexpr (N == 3) {
    [[maybe_unused]] const auto& [a, b, c] = value;
    return std::bool_constant<(kIsUnfit<decltype(a)> || kIsUnfit<decltype(b)> ||
                               kIsUnfit<decltype(c)>)>();
  } else if constexpr (N == 4) {
    [[maybe_unused]] const auto& [a, b, c, d] = value;
    return std::bool_constant<(kIsUnfit<decltype(a)> || kIsUnfit<decltype(b)> ||
                               kIsUnfit<decltype(c)> || kIsUnfit<decltype(d)>)>();
  } else if constexpr (N == 5) {
    [[maybe_unused]] const auto& [a, b, c, d, e] = value;
    return std::bool_constant<(kIsUnfit<decltype(a)> || kIsUnfit<decltype(b)> ||
                               kIsUnfit<decltype(c)> || kIsUnfit<decltype(d)> ||
                               kIsUnfit<decltype(e)>)>();
  } else if constexpr (N == 6) {
    [[maybe_unused]] const auto& [a, b, c, d, e, f] = value;
    return std::bool_constant<(kIsUnfit<decltype(a)> || kIsUnfit<decltype(b)> ||
                               kIsUnfit<decltype(c)> || kIsUnfit<decltype(d)> ||
                               kIsUnfit<decltype(e)> || kIsUnfit<decltype(f)>)>();
  } else if constexpr (N == 7) {
    [[maybe_unused]] const auto& [a, b, c, d, e, f, g] = value;
    return std::bool_constant<(kIsUnfit<decltype(a)> || kIsUnfit<decltype(b)> ||
                               kIsUnfit<decltype(c)> || kIsUnfit<decltype(d)> ||
                               kIsUnfit<decltype(e)> || kIsUnfit<decltype(f)> ||
                               kIsUnfit<decltype(g)>)>();
  } else if constexpr (N == 8) {
    [[maybe_unused]] const auto& [a, b, c, d, e, f, g, h] = value;
    return std::bool_constant<(kIsUnfit<decltype(a)> || kIsUnfit<decltype(b)> ||
                               kIsUnfit<decltype(c)> || kIsUnfit<decltype(d)> ||
                               kIsUnfit<decltype(e)> || kIsUnfit<decltype(f)> ||
                               kIsUnfit<decltype(g)> || kIsUnfit<decltype(h)>)>();
  } else if constexpr (N == 9) {
    [[maybe_unused]] const auto& [a, b, c, d, e, f, g, h, i] = value;
    return std::bool_constant<(
        kIsUnfit<decltype(a)> || kIsUnfit<decltype(b)> || kIsUnfit<decltype(c)> ||
        kIsUnfit<decltype(d)> || kIsUnfit<decltype(e)> || kIsUnfit<decltype(f)> ||
        kIsUnfit<decltype(g)> || kIsUnfit<decltype(h)> || kIsUnfit<decltype(i)>)>();
  } else if constexpr (N == 10) {
    [[maybe_unused]] const auto& [a, b, c, d, e, f, g, h, i, j] = value;
    return std::bool_constant<(kIsUnfit<decltype(a)> || kIsUnfit<decltype(b)> ||
                               kIsUnfit<decltype(c)> || kIsUnfit<decltype(d)> ||
                               kIsUnfit<decltype(e)> || kIsUnfit<decltype(f)> ||
                               kIsUnfit<decltype(g)> || kIsUnfit<decltype(h)> ||
                               kIsUnfit<decltype(i)> || kIsUnfit<decltype(j)>)>();
  } else if constexpr (N == 11) {
    [[maybe_unused]] const auto& [a, b, c, d, e, f, g, h, i, j, k] = value;
    return std::bool_constant<(
        kIsUnfit<decltype(a)> || kIsUnfit<decltype(b)> || kIsUnfit<decltype(c)> ||
        kIsUnfit<decltype(d)> || kIsUnfit<decltype(e)> || kIsUnfit<decltype(f)> ||
        kIsUnfit<decltype(g)> || kIsUnfit<decltype(h)> || kIsUnfit<decltype(i)> ||
        kIsUnfit<decltype(j)> || kIsUnfit<decltype(k)>)>();
  } else if constexpr (N == 12) {
    [[maybe_unused]] const auto& [a, b, c, d, e, f, g, h, i, j, k, l] = value;
    return std::bool_constant<(
        kIsUnfit<decltype(a)> || kIsUnfit<decltype(b)> || kIsUnfit<decltype(c)> ||
        kIsUnfit<decltype(d)> || kIsUnfit<decltype(e)> || kIsUnfit<decltype(f)> ||
        kIsUnfit<decltype(g)> || kIsUnfit<decltype(h)> || kIsUnfit<decltype(i)> ||
        kIsUnfit<decltype(j)> || kIsUnfit<decltype(k)> || kIsUnfit<decltype(l)>)>();
  } else if constexpr (N == 13) {
    [[maybe_unused]] const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m] = value;
    return std::bool_constant<(
        kIsUnfit<decltype(a)> || kIsUnfit<decltype(b)> || kIsUnfit<decltype(c)> ||
        kIsUnfit<decltype(d)> || kIsUnfit<decltype(e)> || kIsUnfit<decltype(f)> ||
        kIsUnfit<decltype(g)> || kIsUnfit<decltype(h)> || kIsUnfit<decltype(i)> ||
        kIsUnfit<decltype(j)> || kIsUnfit<decltype(k)> || kIsUnfit<decltype(l)> ||
        kIsUnfit<decltype(m)>)>();
  } else if constexpr (N == 14) {
    [[maybe_unused]] const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n] = value;
    return std::bool_constant<(
        kIsUnfit<decltype(a)> || kIsUnfit<decltype(b)> || kIsUnfit<decltype(c)> ||
        kIsUnfit<decltype(d)> || kIsUnfit<decltype(e)> || kIsUnfit<decltype(f)> ||
        kIsUnfit<decltype(g)> || kIsUnfit<decltype(h)> || kIsUnfit<decltype(i)> ||
        kIsUnfit<decltype(j)> || kIsUnfit<decltype(k)> || kIsUnfit<decltype(l)> ||
        kIsUnfit<decltype(m)> || kIsUnfit<decltype(n)>)>();
  } else if constexpr (N == 15) {
    [[maybe_unused]] const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o] = value;
    return std::bool_constant<(
        kIsUnfit<decltype(a)> || kIsUnfit<decltype(b)> || kIsUnfit<decltype(c)> ||
        kIsUnfit<decltype(d)> || kIsUnfit<decltype(e)> || kIsUnfit<decltype(f)> ||
        kIsUnfit<decltype(g)> || kIsUnfit<decltype(h)> || kIsUnfit<decltype(i)> ||
        kIsUnfit<decltype(j)> || kIsUnfit<decltype(k)> || kIsUnfit<decltype(l)> ||
        kIsUnfit<decltype(m)> || kIsUnfit<decltype(n)> || kIsUnfit<decltype(o)>)>();
  } else if constexpr (N == 16) {
    [[maybe_unused]] const auto& [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = value;
    return std::bool_constant<(
        kIsUnfit<decltype(a)> || kIsUnfit<decltype(b)> || kIsUnfit<decltype(c)> ||
        kIsUnfit<decltype(d)> || kIsUnfit<decltype(e)> || kIsUnfit<decltype(f)> ||
        kIsUnfit<decltype(g)> || kIsUnfit<decltype(h)> || kIsUnfit<decltype(i)> ||
        kIsUnfit<decltype(j)> || kIsUnfit<decltype(k)> || kIsUnfit<decltype(l)> ||
        kIsUnfit<decltype(m)> || kIsUnfit<decltype(n)> || kIsUnfit<decltype(o)> ||
        kIsUnfit<decltype(p)>)>();
  }
}

template <class T, size_t N>
inline constexpr bool kHasUnfitMember =
    decltype(HasUnfitMember<N>(std::declval<const T&>()))::value;

template <class T>
constexpr size_t CountMembers() {
  if constexpr (!std::is_class_v<T> || !std::is_aggregate_v<T> || std::is_empty_v<T> ||
                !std::is_copy_constructible_v<T>) {
    return 0;
  } else {
    constexpr size_t kCount = CountInitialisers<T, std::min(kMaxMembers + 1, sizeof(T) + 1)>();
    if constexpr (kCount == 0 || kCount > kMaxMembers) {
      return 0;
    } else if constexpr (HasBase<T>(std::make_index_sequence<kCount - 1>())) {
      return 0;
    } else if constexpr (!AreWholeMembers<T, kCount>(std::make_index_sequence<kCount>())) {
      return 0;
    } else if constexpr (kHasUnfitMember<T, kCount>) {
      return 0;
    } else {
      return kCount;
    }
  }
}

}  // namespace aggregate_internal

template <class T>
concept IsDecomposable = aggregate_internal::CountMembers<T>()
> 0;

// A tuple of const references into `value`.
template <IsDecomposable T>
constexpr auto MembersOf(const T& value) {
  return aggregate_internal::Tie<aggregate_internal::CountMembers<T>()>(value);
}

}  // namespace muster

#endif  // MUSTER_WORKER_NESTED_AGGREGATE_H_
