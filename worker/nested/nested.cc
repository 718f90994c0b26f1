#include "worker/nested/nested.h"

#include <string>
#include <utility>

#include "ATen/core/Dict.h"
#include "ATen/core/List.h"
#include "ATen/core/ivalue.h"
#include "ATen/core/jit_type.h"

namespace muster::nested_internal {
namespace {

// Parts that hold neither tensors nor anything that might.
bool IsPlain(const c10::IValue& value) {
  return value.isNone() || value.isScalar() || value.isString() || value.isDevice() ||
         value.isIntList() || value.isDoubleList() || value.isBoolList() ||
         value.isComplexDoubleList() || value.isEnum();
}

[[noreturn]] void Refuse(const c10::IValue& value) {
  TORCH_CHECK(false, "a TorchScript value of type ", value.type()->repr_str(),
              " cannot be seen through: return tensors, or tuples, lists and dictionaries of them");
}

c10::IValue MakeTuple(const c10::IValue& like, std::vector<c10::IValue> elements) {
  const auto type = like.type()->expect<c10::TupleType>();
  // A named tuple keeps its names.
  if (type->schema() != nullptr) return c10::ivalue::Tuple::createNamed(std::move(elements), type);
  return c10::ivalue::Tuple::create(std::move(elements));
}

int Rank(const c10::IValue& key) {
  if (key.isString()) return 0;
  if (key.isInt()) return 1;
  if (key.isDouble()) return 2;
  if (key.isBool()) return 3;
  return 4;
}

}  // namespace

bool KeyLess(const c10::IValue& a, const c10::IValue& b) {
  if (Rank(a) != Rank(b)) return Rank(a) < Rank(b);
  if (a.isString()) return a.toStringRef() < b.toStringRef();
  if (a.isInt()) return a.toInt() < b.toInt();
  if (a.isDouble()) return a.toDouble() < b.toDouble();
  if (a.isBool()) return a.toBool() < b.toBool();
  return false;
}

c10::IValue MapIValue(const c10::IValue& value, MapFunction function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      elements.push_back(MapIValue(element, function));
    }
    return MakeTuple(value, std::move(elements));
  }
  if (IsPlain(value)) return value;
  if (value.isList()) {
    const auto list = value.toList();
    auto result = list.copy();
    for (size_t i = 0; i < list.size(); ++i) result.set(i, MapIValue(list.get(i), function));
    return result;
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    auto result = dict.copy();
    for (const c10::IValue& key : SortedDictKeys(dict)) {
      result.insert_or_assign(key, MapIValue(dict.at(key), function));
    }
    return result;
  }
  Refuse(value);
}

void VisitIValue(const c10::IValue& value, VisitFunction function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) VisitIValue(element, function);
  } else if (IsPlain(value)) {
    return;
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) VisitIValue(element, function);
  } else if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    for (const c10::IValue& key : SortedDictKeys(dict)) VisitIValue(dict.at(key), function);
  } else {
    Refuse(value);
  }
}

c10::IValue ConcatenateIValues(const std::vector<const c10::IValue*>& parts, int64_t dim) {
  const c10::IValue& first = *parts.front();
  // The parts at one place of all tuples, lists or dictionaries.
  const auto join = [&](const auto& get) {
    std::vector<c10::IValue> inner;
    for (const c10::IValue* part : parts) inner.push_back(get(*part));
    std::vector<const c10::IValue*> pointers;
    for (const c10::IValue& value : inner) pointers.push_back(&value);
    return ConcatenateIValues(pointers, dim);
  };
  for (const c10::IValue* part : parts) {
    TORCH_CHECK(part->tagKind() == first.tagKind(), "Concatenate: TorchScript values of type ",
                first.tagKind(), " and ", part->tagKind());
  }
  const auto same_size = [&](size_t size, const auto& size_of) {
    for (const c10::IValue* part : parts) {
      TORCH_CHECK(size_of(*part) == size, "Concatenate: TorchScript values with ", size, " and ",
                  size_of(*part), " elements");
    }
    return size;
  };
  if (first.isTensor()) {
    std::vector<at::Tensor> tensors;
    for (const c10::IValue* part : parts) tensors.push_back(part->toTensor());
    return at::cat(tensors, dim);
  }
  if (first.isTuple()) {
    const size_t size =
        same_size(first.toTupleRef().elements().size(),
                  [](const c10::IValue& part) { return part.toTupleRef().elements().size(); });
    std::vector<c10::IValue> elements;
    for (size_t i = 0; i < size; ++i) {
      elements.push_back(
          join([&](const c10::IValue& part) { return part.toTupleRef().elements()[i]; }));
    }
    return MakeTuple(first, std::move(elements));
  }
  if (!IsPlain(first) && first.isList()) {
    auto result = first.toList().copy();
    same_size(result.size(), [](const c10::IValue& part) { return part.toListRef().size(); });
    for (size_t i = 0; i < result.size(); ++i) {
      result.set(i,
                 join([&](const c10::IValue& part) { return c10::IValue(part.toListRef()[i]); }));
    }
    return result;
  }
  if (first.isGenericDict()) {
    auto result = first.toGenericDict().copy();
    same_size(result.size(), [](const c10::IValue& part) { return part.toGenericDict().size(); });
    for (const c10::IValue& key : SortedDictKeys(first.toGenericDict())) {
      result.insert_or_assign(key, join([&](const c10::IValue& part) {
                                const auto dict = part.toGenericDict();
                                TORCH_CHECK(dict.contains(key),
                                            "Concatenate: the dictionaries have different keys");
                                return dict.at(key);
                              }));
    }
    return result;
  }
  if (!IsPlain(first)) Refuse(first);
  for (const c10::IValue* part : parts) {
    TORCH_CHECK(*part == first,
                "Concatenate: a plain value differs between the parts; put it into a tensor");
  }
  return first;
}

}  // namespace muster::nested_internal
