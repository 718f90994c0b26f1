#include "worker/checkpoint/pickled_tensors.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "base/text.h"

namespace muster {
namespace {

// Each takes some 50 bytes of memory.
constexpr size_t kMaxValues = 8'000'000;
// Two bytes of pickle can copy a list, so these are counted apart.
constexpr size_t kMaxCopiedItems = 8'000'000;
constexpr size_t kMaxMarks = 10'000;
constexpr size_t kMaxTensors = 1'000'000;
// A dictionary may occur in many places, so a small pickle can describe a huge tree.
constexpr size_t kMaxVisits = 4'000'000;
constexpr size_t kMaxDepth = 64;
constexpr size_t kMaxNameBytes = 4096;
constexpr size_t kMaxNamesBytes = size_t{64} << 20;
constexpr size_t kMaxStorageNameBytes = 256;
// More than any function here has.
constexpr size_t kMaxArguments = 16;
constexpr size_t kMaxDimensions = 64;
// The limit for all tensors together, because two bytes of pickle can name a tensor again.
constexpr size_t kMaxAllDimensions = 8'000'000;

enum class Kind : uint8_t {
  kNone,
  kBool,
  kInteger,      // number
  kOpaque,       // a float, bytes, a set, a device: not part of a tensor
  kText,         // number and length: its place in the pickle
  kTuple,        // items
  kList,         // items
  kDict,         // items: key, value, key, value, ...
  kFunction,     // number: a Function
  kType,         // number: a SafetensorsType, as a dtype
  kStorageType,  // number: a SafetensorsType, or kUntyped
  kStorage,      // items: key; type in number, elements in length
  kTensor,       // number: index into the tensors
  kTensorClass,  // a Python class whose objects are dense tensors
};

enum class Function {
  kOrderedDict,
  kCounter,
  kRebuildTensor,
  kRebuildTensorV2,
  kRebuildTensorV3,
  kRebuildParameter,
  kRebuildFromType,
  kSize,
  kOpaque,  // its result is ignored
};

constexpr int64_t kUntyped = -1;

struct Value {
  Kind kind = Kind::kNone;
  int64_t number = 0;
  uint64_t length = 0;
  std::vector<uint32_t> items = {};
};

struct Global {
  absl::string_view name;
  Kind kind;
  int64_t number;
};

constexpr int64_t Of(Function function) { return static_cast<int64_t>(function); }
constexpr int64_t Of(SafetensorsType type) { return static_cast<int64_t>(type); }

// Everything a pickle may name.
constexpr Global kGlobals[] = {
    {"collections.OrderedDict", Kind::kFunction, Of(Function::kOrderedDict)},
    // The milestones of a MultiStepLR, which training checkpoints hold beside the weights.
    {"collections.Counter", Kind::kFunction, Of(Function::kCounter)},
    {"torch._utils._rebuild_tensor", Kind::kFunction, Of(Function::kRebuildTensor)},
    {"torch._utils._rebuild_tensor_v2", Kind::kFunction, Of(Function::kRebuildTensorV2)},
    {"torch._utils._rebuild_tensor_v3", Kind::kFunction, Of(Function::kRebuildTensorV3)},
    {"torch._utils._rebuild_parameter", Kind::kFunction, Of(Function::kRebuildParameter)},
    {"torch._utils._rebuild_parameter_with_state", Kind::kFunction,
     Of(Function::kRebuildParameter)},
    // Tensors with attributes that a program has set, as torch.nn.Buffer does.
    {"torch._tensor._rebuild_from_type_v2", Kind::kFunction, Of(Function::kRebuildFromType)},
    {"torch.Tensor", Kind::kTensorClass, 0},
    {"torch._tensor.Tensor", Kind::kTensorClass, 0},
    {"torch.nn.parameter.Parameter", Kind::kTensorClass, 0},
    {"torch.Size", Kind::kFunction, Of(Function::kSize)},
    {"torch.device", Kind::kFunction, Of(Function::kOpaque)},
    {"__builtin__.set", Kind::kFunction, Of(Function::kOpaque)},
    {"builtins.set", Kind::kFunction, Of(Function::kOpaque)},
    {"__builtin__.frozenset", Kind::kFunction, Of(Function::kOpaque)},
    {"builtins.frozenset", Kind::kFunction, Of(Function::kOpaque)},
    {"__builtin__.complex", Kind::kFunction, Of(Function::kOpaque)},
    {"builtins.complex", Kind::kFunction, Of(Function::kOpaque)},
    {"_codecs.encode", Kind::kFunction, Of(Function::kOpaque)},
    {"__builtin__.bytearray", Kind::kFunction, Of(Function::kOpaque)},
    {"builtins.bytearray", Kind::kFunction, Of(Function::kOpaque)},
    {"torch.BoolStorage", Kind::kStorageType, Of(SafetensorsType::kBool)},
    {"torch.ByteStorage", Kind::kStorageType, Of(SafetensorsType::kU8)},
    {"torch.CharStorage", Kind::kStorageType, Of(SafetensorsType::kI8)},
    {"torch.ShortStorage", Kind::kStorageType, Of(SafetensorsType::kI16)},
    {"torch.IntStorage", Kind::kStorageType, Of(SafetensorsType::kI32)},
    {"torch.LongStorage", Kind::kStorageType, Of(SafetensorsType::kI64)},
    {"torch.HalfStorage", Kind::kStorageType, Of(SafetensorsType::kF16)},
    {"torch.BFloat16Storage", Kind::kStorageType, Of(SafetensorsType::kBF16)},
    {"torch.FloatStorage", Kind::kStorageType, Of(SafetensorsType::kF32)},
    {"torch.DoubleStorage", Kind::kStorageType, Of(SafetensorsType::kF64)},
    {"torch.ComplexFloatStorage", Kind::kStorageType, Of(SafetensorsType::kC64)},
    {"torch.storage.UntypedStorage", Kind::kStorageType, kUntyped},
    {"torch.UntypedStorage", Kind::kStorageType, kUntyped},
    {"torch.bool", Kind::kType, Of(SafetensorsType::kBool)},
    {"torch.uint8", Kind::kType, Of(SafetensorsType::kU8)},
    {"torch.int8", Kind::kType, Of(SafetensorsType::kI8)},
    {"torch.int16", Kind::kType, Of(SafetensorsType::kI16)},
    {"torch.uint16", Kind::kType, Of(SafetensorsType::kU16)},
    {"torch.int32", Kind::kType, Of(SafetensorsType::kI32)},
    {"torch.uint32", Kind::kType, Of(SafetensorsType::kU32)},
    {"torch.int64", Kind::kType, Of(SafetensorsType::kI64)},
    {"torch.uint64", Kind::kType, Of(SafetensorsType::kU64)},
    {"torch.float16", Kind::kType, Of(SafetensorsType::kF16)},
    {"torch.bfloat16", Kind::kType, Of(SafetensorsType::kBF16)},
    {"torch.float32", Kind::kType, Of(SafetensorsType::kF32)},
    {"torch.float64", Kind::kType, Of(SafetensorsType::kF64)},
    {"torch.complex64", Kind::kType, Of(SafetensorsType::kC64)},
    {"torch.float8_e5m2", Kind::kType, Of(SafetensorsType::kF8E5M2)},
    {"torch.float8_e4m3fn", Kind::kType, Of(SafetensorsType::kF8E4M3)},
    {"torch.float8_e8m0fnu", Kind::kType, Of(SafetensorsType::kF8E8M0)},
    {"torch.float8_e4m3fnuz", Kind::kType, Of(SafetensorsType::kF8E4M3Fnuz)},
    {"torch.float8_e5m2fnuz", Kind::kType, Of(SafetensorsType::kF8E5M2Fnuz)},
};

// The following types are of dense tensors, but have no counterpart.
constexpr absl::string_view kUnreadTypes[] = {"torch.ComplexDoubleStorage", "torch.complex128",
                                              "torch.complex32"};

// The machine that executes a pickle: a stack of values, marks in it, and a memo.
class Machine {
 public:
  Machine(absl::string_view pickle, absl::string_view source) : pickle_(pickle), source_(source) {}

  absl::StatusOr<std::vector<PickledTensor>> Run() {
    // Protocols 0 and 1 do not begin with a version.
    if (!pickle_.empty() && pickle_[0] != '\x80') {
      return Bad(
          "the pickle does not begin with its protocol, so it is of protocol 0 or 1, which are not "
          "read: save it again without pickle_protocol");
    }
    while (!stopped_) {
      opcode_at_ = at_;
      if (at_ >= pickle_.size()) return Bad("the pickle ends without its last instruction");
      MUSTER_RETURN_IF_ERROR(Step(static_cast<uint8_t>(pickle_[at_++])));
    }
    if (at_ != pickle_.size()) return Bad("something follows the pickle's last instruction");
    return Collect();
  }

 private:
  absl::Status Bad(absl::string_view why) const {
    return absl::InvalidArgumentError(absl::StrCat(source_, ": byte ", opcode_at_, ": ", why));
  }

  // --- What instructions read ---

  absl::Status Take(size_t bytes, absl::string_view* taken) {
    if (bytes > pickle_.size() - at_) return Bad("the pickle is cut short in this instruction");
    *taken = pickle_.substr(at_, bytes);
    at_ += bytes;
    return absl::OkStatus();
  }

  absl::Status TakeNumber(int bytes, uint64_t* number) {
    absl::string_view text;
    MUSTER_RETURN_IF_ERROR(Take(bytes, &text));
    *number = 0;
    for (int i = bytes - 1; i >= 0; --i) *number = *number << 8 | static_cast<uint8_t>(text[i]);
    return absl::OkStatus();
  }

  absl::Status TakeLine(absl::string_view* line) {
    const size_t end = pickle_.find('\n', at_);
    if (end == absl::string_view::npos) return Bad("the pickle is cut short in a name");
    *line = pickle_.substr(at_, end - at_);
    at_ = end + 1;
    return absl::OkStatus();
  }

  // --- The stack ---

  absl::Status Push(Value value) {
    if (values_.size() >= kMaxValues) {
      return Bad(absl::StrCat("the pickle holds more than the ", kMaxValues, " values allowed"));
    }
    stack_.push_back(values_.size());
    values_.push_back(std::move(value));
    return absl::OkStatus();
  }

  // Values above the last mark cannot be taken by an instruction for single values.
  size_t Floor() const { return marks_.empty() ? 0 : marks_.back(); }

  absl::Status Need(size_t count) const {
    if (stack_.size() - Floor() >= count) return absl::OkStatus();
    return Bad("the instruction takes more values than there are");
  }

  absl::Status Pop(uint32_t* id) {
    MUSTER_RETURN_IF_ERROR(Need(1));
    *id = stack_.back();
    stack_.pop_back();
    return absl::OkStatus();
  }

  absl::Status PopToMark(std::vector<uint32_t>* ids) {
    if (marks_.empty()) return Bad("the instruction takes values from a mark that does not exist");
    ids->assign(stack_.begin() + marks_.back(), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return absl::OkStatus();
  }

  // The value on top, which the instruction fills.
  absl::Status Top(Kind kind, absl::string_view what, Value** top) {
    MUSTER_RETURN_IF_ERROR(Need(1));
    *top = &values_[stack_.back()];
    if ((*top)->kind != kind) return Bad(absl::StrCat("the instruction fills what is not ", what));
    return absl::OkStatus();
  }

  absl::Status PushText(int length_bytes) {
    uint64_t length = 0;
    MUSTER_RETURN_IF_ERROR(TakeNumber(length_bytes, &length));
    const uint64_t begin = at_;
    absl::string_view text;
    MUSTER_RETURN_IF_ERROR(Take(length, &text));
    return Push({.kind = Kind::kText, .number = static_cast<int64_t>(begin), .length = length});
  }

  absl::Status PushOpaque(int length_bytes) {
    uint64_t length = 0;
    absl::string_view bytes;
    MUSTER_RETURN_IF_ERROR(TakeNumber(length_bytes, &length));
    MUSTER_RETURN_IF_ERROR(Take(length, &bytes));
    return Push({.kind = Kind::kOpaque});
  }

  // Pushes a number of any length, as Python has them; nothing here can use one beyond 64 bits.
  absl::Status PushLong(int length_bytes) {
    uint64_t length = 0;
    absl::string_view bytes;
    MUSTER_RETURN_IF_ERROR(TakeNumber(length_bytes, &length));
    MUSTER_RETURN_IF_ERROR(Take(length, &bytes));
    if (length > 8) return Push({.kind = Kind::kOpaque});
    uint64_t number = length > 0 && (bytes[length - 1] & 0x80) != 0 ? ~uint64_t{0} : 0;
    for (size_t i = length; i > 0; --i) {
      number = number << 8 | static_cast<uint8_t>(bytes[i - 1]);
    }
    return Push({.kind = Kind::kInteger, .number = static_cast<int64_t>(number)});
  }

  absl::Status Remember(uint64_t place) {
    MUSTER_RETURN_IF_ERROR(Need(1));
    if (memo_.size() >= kMaxValues && !memo_.contains(place)) {
      return Bad(absl::StrCat("the pickle stores more than the ", kMaxValues, " values allowed"));
    }
    memo_[place] = stack_.back();
    return absl::OkStatus();
  }

  absl::Status Recall(uint64_t place) {
    const auto found = memo_.find(place);
    if (found == memo_.end()) return Bad("the pickle recalls a value that it has not stored");
    // The stack grows only by two bytes of pickle per value, so it needs no limit of its own.
    stack_.push_back(found->second);
    return absl::OkStatus();
  }

  absl::Status CountCopied(size_t items) {
    copied_items_ += items;
    if (copied_items_ <= kMaxCopiedItems) return absl::OkStatus();
    return Bad(absl::StrCat("the pickle copies more than the ", kMaxCopiedItems, " items allowed"));
  }

  absl::Status CountDimensions(const PickledTensor& tensor) {
    dimensions_ += tensor.shape.size();
    if (dimensions_ <= kMaxAllDimensions) return absl::OkStatus();
    return Bad(absl::StrCat("the tensors have more than the ", kMaxAllDimensions,
                            " dimensions allowed in all"));
  }

  absl::Status Step(uint8_t opcode);
  absl::Status PushGlobal(absl::string_view module, absl::string_view name);
  absl::Status Reduce();
  absl::Status Call(Function function, const std::vector<uint32_t>& arguments);
  absl::Status RebuildFromType(const std::vector<uint32_t>& arguments);
  absl::Status LoadPersistent();
  absl::Status RebuildTensor(Function function, const std::vector<uint32_t>& arguments);
  absl::Status Sizes(uint32_t id, absl::string_view what, std::vector<uint64_t>* sizes);
  // Returns the entry of `container`, which is called `name`, at `*next`, and the part of the name
  // that leads to it; advances `*next`.
  absl::Status NextEntry(const Value& container, absl::string_view name, size_t* next,
                         std::string* step, uint32_t* child) const;
  absl::StatusOr<std::vector<PickledTensor>> Collect();

  absl::string_view TextOf(const Value& value) const {
    return pickle_.substr(value.number, value.length);
  }

  const absl::string_view pickle_;
  const absl::string_view source_;
  size_t at_ = 0;
  size_t opcode_at_ = 0;
  bool stopped_ = false;
  // Values refer to each other by their position here, so that no chain of them needs recursion.
  std::vector<Value> values_;
  std::vector<uint32_t> stack_;
  std::vector<size_t> marks_;
  absl::flat_hash_map<uint64_t, uint32_t> memo_;
  std::vector<PickledTensor> tensors_;
  size_t copied_items_ = 0;
  size_t dimensions_ = 0;
};

absl::Status Machine::PushGlobal(absl::string_view module, absl::string_view name) {
  const std::string full = absl::StrCat(module, ".", name);
  for (const Global& global : kGlobals) {
    if (global.name == full) return Push({.kind = global.kind, .number = global.number});
  }
  for (const absl::string_view type : kUnreadTypes) {
    if (type != full) continue;
    return Bad(absl::StrCat("the pickle names ", type,
                            ", a type that is not read, nor held by safetensors: convert such "
                            "tensors, or leave them out"));
  }
  return Bad(
      absl::StrCat("the pickle names ", Printable(full),
                   ", which is refused: only dense tensors in plain containers are read, and "
                   "nothing is executed. Save the state_dict alone, or as safetensors"));
}

absl::Status Machine::Sizes(uint32_t id, absl::string_view what, std::vector<uint64_t>* sizes) {
  const Value& value = values_[id];
  if (value.kind != Kind::kTuple && value.kind != Kind::kList) {
    return Bad(absl::StrCat("a tensor's ", what, " is not a tuple"));
  }
  if (value.items.size() > kMaxDimensions) {
    return Bad(absl::StrCat("a tensor has ", value.items.size(), " dimensions, more than the ",
                            kMaxDimensions, " allowed"));
  }
  for (const uint32_t item : value.items) {
    if (values_[item].kind != Kind::kInteger || values_[item].number < 0) {
      return Bad(absl::StrCat("a tensor's ", what, " holds what is not a size"));
    }
    sizes->push_back(values_[item].number);
  }
  return absl::OkStatus();
}

absl::Status Machine::RebuildTensor(Function function, const std::vector<uint32_t>& arguments) {
  const size_t least = function == Function::kRebuildTensor     ? 4
                       : function == Function::kRebuildTensorV2 ? 6
                                                                : 7;
  if (arguments.size() < least || arguments.size() > least + 1) {
    return Bad(absl::StrCat("a tensor has ", arguments.size(), " arguments"));
  }
  if (arguments.size() > least) {
    const Value& metadata = values_[arguments[least]];
    const bool empty =
        metadata.kind == Kind::kNone || (metadata.kind == Kind::kDict && metadata.items.empty());
    if (!empty) {
      return Bad(
          "a tensor is a conjugated or negated view of its storage: save it after "
          ".resolve_conj().resolve_neg()");
    }
  }
  const Value& storage = values_[arguments[0]];
  const Value& offset = values_[arguments[1]];
  if (storage.kind != Kind::kStorage) return Bad("a tensor's storage is not one");
  if (offset.kind != Kind::kInteger || offset.number < 0) {
    return Bad("a tensor's offset is not a number of elements");
  }
  PickledTensor tensor{.storage = std::string(TextOf(values_[storage.items[0]])),
                       .offset = static_cast<uint64_t>(offset.number)};
  int64_t type = storage.number;
  if (function == Function::kRebuildTensorV3) {
    const Value& wanted = values_[arguments[6]];
    if (wanted.kind != Kind::kType) return Bad("a tensor's type is not one");
    type = wanted.number;
  }
  if (type == kUntyped) return Bad("a tensor in untyped storage does not say its type");
  tensor.type = static_cast<SafetensorsType>(type);
  const uint64_t element_bytes = SafetensorsTypeBits(tensor.type) / 8;
  const uint64_t storage_element_bytes =
      storage.number == kUntyped
          ? 1
          : SafetensorsTypeBits(static_cast<SafetensorsType>(storage.number)) / 8;
  if (__builtin_mul_overflow(storage.length, storage_element_bytes, &tensor.storage_bytes)) {
    return Bad("a storage is too large");
  }
  MUSTER_RETURN_IF_ERROR(Sizes(arguments[2], "shape", &tensor.shape));
  MUSTER_RETURN_IF_ERROR(Sizes(arguments[3], "strides", &tensor.strides));
  if (tensor.shape.size() != tensor.strides.size()) {
    return Bad("a tensor's shape and strides differ in length");
  }
  // Compute where the last element ends. An overflow of the shape alone counts, too, because with a
  // stride of 0 any shape fits.
  const absl::StatusOr<uint64_t> bytes = SafetensorsBytes(tensor.type, tensor.shape);
  if (!bytes.ok() || *bytes > uint64_t{1} << 62) return Bad("a tensor's shape is too large");
  uint64_t last = tensor.offset;
  bool overflow = false;
  for (size_t i = 0; *bytes > 0 && i < tensor.shape.size(); ++i) {
    uint64_t step = 0;
    overflow = overflow || __builtin_mul_overflow(tensor.shape[i] - 1, tensor.strides[i], &step) ||
               __builtin_add_overflow(last, step, &last);
  }
  if (overflow || (*bytes > 0 && last >= tensor.storage_bytes / element_bytes)) {
    return Bad(absl::StrCat("a tensor leaves its storage \"", Printable(tensor.storage), "\""));
  }
  if (*bytes > 0) tensor.extent_bytes = (last - tensor.offset + 1) * element_bytes;
  if (tensors_.size() >= kMaxTensors) {
    return Bad(absl::StrCat("the pickle holds more than the ", kMaxTensors, " tensors allowed"));
  }
  MUSTER_RETURN_IF_ERROR(CountDimensions(tensor));
  const int64_t index = tensors_.size();
  tensors_.push_back(std::move(tensor));
  return Push({.kind = Kind::kTensor, .number = index});
}

absl::Status Machine::Reduce() {
  uint32_t arguments_id = 0, function_id = 0;
  MUSTER_RETURN_IF_ERROR(Pop(&arguments_id));
  MUSTER_RETURN_IF_ERROR(Pop(&function_id));
  if (values_[function_id].kind != Kind::kFunction) {
    return Bad("the pickle calls what is not a function");
  }
  if (values_[arguments_id].kind != Kind::kTuple) return Bad("a call's arguments are not a tuple");
  if (values_[arguments_id].items.size() > kMaxArguments)
    return Bad("a call has too many arguments");
  // A copy, because pushing a value moves the others.
  const std::vector<uint32_t> arguments = values_[arguments_id].items;
  return Call(static_cast<Function>(values_[function_id].number), arguments);
}

// Handles (function, class, its arguments, attributes): a tensor of that class, with attributes,
// which are ignored.
absl::Status Machine::RebuildFromType(const std::vector<uint32_t>& arguments) {
  if (arguments.size() != 4 || values_[arguments[0]].kind != Kind::kFunction ||
      values_[arguments[2]].kind != Kind::kTuple) {
    return Bad("a tensor of a class is not described as torch.save does");
  }
  if (values_[arguments[1]].kind != Kind::kTensorClass) {
    return Bad("a tensor is of what is not a class of dense tensors");
  }
  const Value& attributes = values_[arguments[3]];
  const bool none = attributes.kind == Kind::kTuple && attributes.items.empty();
  if (attributes.kind != Kind::kNone && attributes.kind != Kind::kDict && !none) {
    return Bad("a tensor's attributes are not a dictionary");
  }
  const auto function = static_cast<Function>(values_[arguments[0]].number);
  if (function != Function::kRebuildTensor && function != Function::kRebuildTensorV2 &&
      function != Function::kRebuildTensorV3 && function != Function::kRebuildParameter) {
    return Bad("a tensor of a class is not made by what makes dense tensors");
  }
  if (values_[arguments[2]].items.size() > kMaxArguments)
    return Bad("a call has too many arguments");
  const std::vector<uint32_t> of_function = values_[arguments[2]].items;
  return Call(function, of_function);
}

absl::Status Machine::Call(Function function, const std::vector<uint32_t>& arguments) {
  switch (function) {
    case Function::kRebuildFromType:
      return RebuildFromType(arguments);
    case Function::kOpaque:
      return Push({.kind = Kind::kOpaque});
    case Function::kSize:
      if (arguments.size() != 1 || (values_[arguments[0]].kind != Kind::kTuple &&
                                    values_[arguments[0]].kind != Kind::kList)) {
        return Bad("torch.Size is not made of a tuple");
      }
      MUSTER_RETURN_IF_ERROR(CountCopied(values_[arguments[0]].items.size()));
      return Push({.kind = Kind::kTuple, .items = values_[arguments[0]].items});
    case Function::kOrderedDict: {
      Value dict{.kind = Kind::kDict};
      if (arguments.size() > 1) return Bad("collections.OrderedDict has several arguments");
      if (arguments.size() == 1) {
        const Value& pairs = values_[arguments[0]];
        if (pairs.kind != Kind::kList && pairs.kind != Kind::kTuple) {
          return Bad("collections.OrderedDict is not made of a list of pairs");
        }
        MUSTER_RETURN_IF_ERROR(CountCopied(pairs.items.size() * 2));
        for (const uint32_t pair : pairs.items) {
          const Value& two = values_[pair];
          if ((two.kind != Kind::kList && two.kind != Kind::kTuple) || two.items.size() != 2) {
            return Bad("collections.OrderedDict is not made of a list of pairs");
          }
          dict.items.insert(dict.items.end(), two.items.begin(), two.items.end());
        }
      }
      return Push(std::move(dict));
    }
    case Function::kCounter: {
      if (arguments.size() != 1 || values_[arguments[0]].kind != Kind::kDict) {
        return Bad("collections.Counter is not made of a dictionary");
      }
      MUSTER_RETURN_IF_ERROR(CountCopied(values_[arguments[0]].items.size()));
      return Push({.kind = Kind::kDict, .items = values_[arguments[0]].items});
    }
    case Function::kRebuildParameter: {
      if (arguments.empty() || values_[arguments[0]].kind != Kind::kTensor) {
        return Bad("a parameter is not made of a tensor");
      }
      return Push({.kind = Kind::kTensor, .number = values_[arguments[0]].number});
    }
    case Function::kRebuildTensor:
    case Function::kRebuildTensorV2:
    case Function::kRebuildTensorV3:
      return RebuildTensor(function, arguments);
  }
  return Bad("the pickle calls what is not a function");
}

// Handles ("storage", type, key, device, elements): the description of a storage.
absl::Status Machine::LoadPersistent() {
  uint32_t id = 0;
  MUSTER_RETURN_IF_ERROR(Pop(&id));
  std::vector<uint32_t> parts;
  if (values_[id].kind == Kind::kTuple && values_[id].items.size() <= kMaxArguments) {
    parts = values_[id].items;
  }
  if (parts.size() < 5 || values_[parts[0]].kind != Kind::kText ||
      TextOf(values_[parts[0]]) != "storage" || values_[parts[1]].kind != Kind::kStorageType ||
      values_[parts[2]].kind != Kind::kText || values_[parts[4]].kind != Kind::kInteger ||
      values_[parts[4]].number < 0) {
    return Bad("a storage is not described as torch.save does");
  }
  if (values_[parts[2]].length > kMaxStorageNameBytes) return Bad("a storage's name is too long");
  return Push({.kind = Kind::kStorage,
               .number = values_[parts[1]].number,
               .length = static_cast<uint64_t>(values_[parts[4]].number),
               .items = {parts[2]}});
}

absl::Status Machine::Step(uint8_t opcode) {
  uint64_t number = 0;
  uint32_t id = 0;
  Value* top = nullptr;
  std::vector<uint32_t> ids;
  absl::string_view first, second;
  switch (opcode) {
    case 0x80:  // PROTO
      MUSTER_RETURN_IF_ERROR(TakeNumber(1, &number));
      if (number < 2 || number > 5) {
        return Bad(absl::StrCat("pickle protocol ", number, " is not one of 2 to 5"));
      }
      return absl::OkStatus();
    case 0x95:  // FRAME: a hint for readers of streams
      return TakeNumber(8, &number);
    case '.':  // STOP
      MUSTER_RETURN_IF_ERROR(Need(1));
      if (stack_.size() != 1 || !marks_.empty()) return Bad("the pickle leaves several values");
      stopped_ = true;
      return absl::OkStatus();

    case 'N':
      return Push({.kind = Kind::kNone});
    case 0x88:  // NEWTRUE
      return Push({.kind = Kind::kBool, .number = 1});
    case 0x89:  // NEWFALSE
      return Push({.kind = Kind::kBool});
    case 'K':  // BININT1
      MUSTER_RETURN_IF_ERROR(TakeNumber(1, &number));
      return Push({.kind = Kind::kInteger, .number = static_cast<int64_t>(number)});
    case 'M':  // BININT2
      MUSTER_RETURN_IF_ERROR(TakeNumber(2, &number));
      return Push({.kind = Kind::kInteger, .number = static_cast<int64_t>(number)});
    case 'J':  // BININT
      MUSTER_RETURN_IF_ERROR(TakeNumber(4, &number));
      return Push({.kind = Kind::kInteger, .number = static_cast<int32_t>(number)});
    case 0x8a:  // LONG1
      return PushLong(1);
    case 0x8b:  // LONG4
      return PushLong(4);
    case 'G':  // BINFLOAT
      MUSTER_RETURN_IF_ERROR(TakeNumber(8, &number));
      return Push({.kind = Kind::kOpaque});
    case 0x8c:  // SHORT_BINUNICODE
      return PushText(1);
    case 'X':  // BINUNICODE
      return PushText(4);
    case 0x8d:  // BINUNICODE8
      return PushText(8);
    case 'U':  // SHORT_BINSTRING
    case 'C':  // SHORT_BINBYTES
      return PushOpaque(1);
    case 'T':  // BINSTRING
    case 'B':  // BINBYTES
      return PushOpaque(4);
    case 0x8e:  // BINBYTES8
    case 0x96:  // BYTEARRAY8
      return PushOpaque(8);

    case ')':
      return Push({.kind = Kind::kTuple});
    case 0x85:  // TUPLE1
    case 0x86:  // TUPLE2
    case 0x87:  // TUPLE3
      MUSTER_RETURN_IF_ERROR(Need(opcode - 0x84));
      ids.assign(stack_.end() - (opcode - 0x84), stack_.end());
      stack_.resize(stack_.size() - ids.size());
      return Push({.kind = Kind::kTuple, .items = std::move(ids)});
    case 't':  // TUPLE
      MUSTER_RETURN_IF_ERROR(PopToMark(&ids));
      return Push({.kind = Kind::kTuple, .items = std::move(ids)});
    case ']':
      return Push({.kind = Kind::kList});
    case 'l':  // LIST
      MUSTER_RETURN_IF_ERROR(PopToMark(&ids));
      return Push({.kind = Kind::kList, .items = std::move(ids)});
    case 'a':  // APPEND
      MUSTER_RETURN_IF_ERROR(Pop(&id));
      MUSTER_RETURN_IF_ERROR(Top(Kind::kList, "a list", &top));
      top->items.push_back(id);
      return absl::OkStatus();
    case 'e':  // APPENDS
      MUSTER_RETURN_IF_ERROR(PopToMark(&ids));
      MUSTER_RETURN_IF_ERROR(Top(Kind::kList, "a list", &top));
      top->items.insert(top->items.end(), ids.begin(), ids.end());
      return absl::OkStatus();
    case '}':
      return Push({.kind = Kind::kDict});
    case 'd':  // DICT
      MUSTER_RETURN_IF_ERROR(PopToMark(&ids));
      if (ids.size() % 2 != 0) return Bad("a dictionary has a key without a value");
      return Push({.kind = Kind::kDict, .items = std::move(ids)});
    case 's':  // SETITEM
      MUSTER_RETURN_IF_ERROR(Need(3));
      ids.assign(stack_.end() - 2, stack_.end());
      stack_.resize(stack_.size() - 2);
      MUSTER_RETURN_IF_ERROR(Top(Kind::kDict, "a dictionary", &top));
      top->items.insert(top->items.end(), ids.begin(), ids.end());
      return absl::OkStatus();
    case 'u':  // SETITEMS
      MUSTER_RETURN_IF_ERROR(PopToMark(&ids));
      if (ids.size() % 2 != 0) return Bad("a dictionary has a key without a value");
      MUSTER_RETURN_IF_ERROR(Top(Kind::kDict, "a dictionary", &top));
      top->items.insert(top->items.end(), ids.begin(), ids.end());
      return absl::OkStatus();
    case 0x8f:  // EMPTY_SET
      return Push({.kind = Kind::kOpaque});
    case 0x90:  // ADDITEMS
      MUSTER_RETURN_IF_ERROR(PopToMark(&ids));
      return Top(Kind::kOpaque, "a set", &top);
    case 0x91:  // FROZENSET
      MUSTER_RETURN_IF_ERROR(PopToMark(&ids));
      return Push({.kind = Kind::kOpaque});

    case '(':  // MARK
      if (marks_.size() >= kMaxMarks) return Bad("the pickle is nested too deep");
      marks_.push_back(stack_.size());
      return absl::OkStatus();
    case '0':  // POP
      return Pop(&id);
    case '1':  // POP_MARK
      return PopToMark(&ids);
    case '2':  // DUP
      MUSTER_RETURN_IF_ERROR(Need(1));
      stack_.push_back(stack_.back());
      return absl::OkStatus();
    case 'q':  // BINPUT
      MUSTER_RETURN_IF_ERROR(TakeNumber(1, &number));
      return Remember(number);
    case 'r':  // LONG_BINPUT
      MUSTER_RETURN_IF_ERROR(TakeNumber(4, &number));
      return Remember(number);
    case 0x94:  // MEMOIZE
      return Remember(memo_.size());
    case 'h':  // BINGET
      MUSTER_RETURN_IF_ERROR(TakeNumber(1, &number));
      return Recall(number);
    case 'j':  // LONG_BINGET
      MUSTER_RETURN_IF_ERROR(TakeNumber(4, &number));
      return Recall(number);

    case 'c':  // GLOBAL
      MUSTER_RETURN_IF_ERROR(TakeLine(&first));
      MUSTER_RETURN_IF_ERROR(TakeLine(&second));
      return PushGlobal(first, second);
    case 0x93: {  // STACK_GLOBAL
      uint32_t module = 0;
      MUSTER_RETURN_IF_ERROR(Pop(&id));
      MUSTER_RETURN_IF_ERROR(Pop(&module));
      if (values_[id].kind != Kind::kText || values_[module].kind != Kind::kText) {
        return Bad("the pickle names a function by what is not text");
      }
      return PushGlobal(TextOf(values_[module]), TextOf(values_[id]));
    }
    case 'R':  // REDUCE
      return Reduce();
    case 'Q':  // BINPERSID
      return LoadPersistent();
    case 'b':  // BUILD: the attributes of a dictionary, such as a state_dict's _metadata
      MUSTER_RETURN_IF_ERROR(Pop(&id));
      if (values_[id].kind != Kind::kDict) return Bad("attributes are not a dictionary");
      return Top(Kind::kDict, "a dictionary", &top);
  }
  return Bad(
      absl::StrFormat("the pickle's instruction 0x%02x is refused: torch.save does not write "
                      "it for tensors in plain containers",
                      opcode));
}

absl::Status Machine::NextEntry(const Value& container, absl::string_view name, size_t* next,
                                std::string* step, uint32_t* child) const {
  if (container.kind == Kind::kDict) {
    const Value& key = values_[container.items[*next]];
    *child = container.items[*next + 1];
    *next += 2;
    const Kind held = values_[*child].kind;
    if (key.kind == Kind::kText) {
      *step = std::string(TextOf(key).substr(0, kMaxNameBytes + 1));
    } else if (key.kind == Kind::kInteger) {
      *step = absl::StrCat(key.number);
    } else if (held == Kind::kTensor || held == Kind::kDict || held == Kind::kList ||
               held == Kind::kTuple) {
      return Bad(
          absl::StrCat("a key below \"", Printable(name), "\" is neither text nor an integer"));
    }
  } else {
    *step = absl::StrCat(*next);
    *child = container.items[(*next)++];
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<PickledTensor>> Machine::Collect() {
  struct Place {
    uint32_t id;
    size_t next;
    size_t name_bytes;
  };
  std::vector<PickledTensor> found;
  absl::flat_hash_set<std::string> names;
  std::vector<Place> path;
  std::string name;
  size_t visits = 0;
  size_t names_bytes = 0;
  const auto enter = [&](uint32_t id) -> absl::Status {
    const Value& value = values_[id];
    if (++visits > kMaxVisits) {
      return Bad(absl::StrCat("the containers hold each other more than the ", kMaxVisits,
                              " times allowed"));
    }
    if (value.kind == Kind::kTensor) {
      if (!IsValidUtf8(name)) {
        return Bad(absl::StrCat("the name \"", Printable(name), "\" is not UTF-8"));
      }
      if (!names.insert(name).second) {
        return Bad(absl::StrCat("the name \"", Printable(name), "\" occurs twice"));
      }
      names_bytes += name.size();
      if (found.size() >= kMaxTensors || names_bytes > kMaxNamesBytes) {
        return Bad("the file names more tensors than allowed");
      }
      MUSTER_RETURN_IF_ERROR(CountDimensions(tensors_[value.number]));
      found.push_back(tensors_[value.number]);
      found.back().name = name;
      return absl::OkStatus();
    }
    if (value.kind != Kind::kDict && value.kind != Kind::kList && value.kind != Kind::kTuple) {
      return absl::OkStatus();
    }
    if (path.size() >= kMaxDepth) {
      return Bad(absl::StrCat("containers are nested deeper than the ", kMaxDepth, " allowed"));
    }
    path.push_back({.id = id, .next = 0, .name_bytes = name.size()});
    return absl::OkStatus();
  };
  const Kind kind = values_[stack_.back()].kind;
  if (kind != Kind::kDict && kind != Kind::kList && kind != Kind::kTuple) {
    return Bad("the file holds no dictionary of tensors");
  }
  MUSTER_RETURN_IF_ERROR(enter(stack_.back()));
  while (!path.empty()) {
    Place& place = path.back();
    const Value& container = values_[place.id];
    name.resize(place.name_bytes);
    if (place.next >= container.items.size()) {
      path.pop_back();
      continue;
    }
    std::string step;
    uint32_t child = 0;
    MUSTER_RETURN_IF_ERROR(NextEntry(container, name, &place.next, &step, &child));
    if (name.size() + step.size() + 1 > kMaxNameBytes) {
      return Bad(absl::StrCat("the name \"", Printable(name), "...\" is longer than the ",
                              kMaxNameBytes, " bytes allowed"));
    }
    // The name of the root's own entries has no dot before it.
    if (path.size() > 1) name += '.';
    name += step;
    MUSTER_RETURN_IF_ERROR(enter(child));
  }
  return found;
}

}  // namespace

absl::StatusOr<std::vector<PickledTensor>> ParsePickledTensors(absl::string_view pickle,
                                                               absl::string_view source) {
  if (pickle.size() > kMaxPickleBytes) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": a pickle of ", pickle.size(),
                                                   " bytes is more than the ", kMaxPickleBytes,
                                                   " allowed"));
  }
  return Machine(pickle, source).Run();
}

}  // namespace muster
