#include "worker/text/tokenizer_core.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/text/encoding_ops.h"
#include "worker/text/settings.h"
#include "worker/text/unicode.h"

namespace muster::text {
namespace {

using Json = nlohmann::json;

// Windows of the parts of a template combine; a template that repeats texts would combine millions.
constexpr double kMaxWindows = 1 << 20;

// Converts byte offsets of a text to offsets of code points.
class CodePoints {
 public:
  explicit CodePoints(absl::string_view text) : bytes_(text.size()) {
    if (CountCharacters(text) == text.size()) return;
    index_.reserve(text.size());
    uint32_t index = 0;
    for (size_t at = 0; at < text.size(); ++index) {
      NextCharacter(text, at);
      index_.resize(at, index);
    }
  }

  Encoding::Offsets Convert(int64_t begin, int64_t end) const {
    const auto size = static_cast<int64_t>(bytes_);
    // As in the tokenizers library, a range that begins after the text is left unchanged.
    if (begin >= size) return {begin, end};
    const int64_t first = At(begin);
    if (end < size) return {first, At(end)};
    return {first, (end - 1 < size ? At(end - 1) : first + 1) + 1};
  }

 private:
  int64_t At(int64_t byte) const { return index_.empty() ? byte : index_[byte]; }

  const size_t bytes_;
  std::vector<uint32_t> index_;  // number of each byte's code point; empty: that of the byte
};

TextSide SideOf(Settings& settings, absl::string_view name) {
  return settings.Choice(name, {"Left", "Right"}, 1) == 0 ? TextSide::kLeft : TextSide::kRight;
}

constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max();

absl::StatusOr<std::optional<Truncation>> ReadTruncation(const Json& json,
                                                         const std::string& path) {
  if (json.is_null()) return std::optional<Truncation>();
  Settings settings(json, path);
  Truncation truncation;
  truncation.max_length = settings.Count("max_length", kMaxLength);
  truncation.stride = settings.Count("stride", kMaxLength);
  truncation.strategy = static_cast<Truncation::Strategy>(
      settings.Choice("strategy", {"LongestFirst", "OnlyFirst", "OnlySecond"}));
  truncation.direction = SideOf(settings, "direction");
  MUSTER_RETURN_IF_ERROR(settings.Finish());
  return std::optional<Truncation>(truncation);
}

absl::StatusOr<std::optional<Padding>> ReadPadding(const Json& json, const std::string& path) {
  if (json.is_null()) return std::optional<Padding>();
  // No one intends to use memory for so many tokens.
  constexpr int64_t kMost = 1 << 20;
  Settings settings(json, path);
  Padding padding;
  const Json* const strategy = settings.Find("strategy");
  if (strategy != nullptr && strategy->is_object()) {
    Settings fixed(*strategy, settings.PathOf("strategy"));
    padding.length = fixed.Count("Fixed", kMost);
    MUSTER_RETURN_IF_ERROR(fixed.Finish());
  } else if (strategy == nullptr || *strategy != "BatchLongest") {
    return settings.Wrong("strategy", "must be \"BatchLongest\" or {\"Fixed\": length}");
  }
  padding.direction = SideOf(settings, "direction");
  padding.pad_to_multiple_of = settings.Count("pad_to_multiple_of", kMost, 0);
  padding.pad_id = settings.Id("pad_id");
  padding.pad_type_id = settings.Id("pad_type_id");
  padding.pad_token = settings.String("pad_token");
  MUSTER_RETURN_IF_ERROR(settings.Finish());
  return std::optional<Padding>(padding);
}

}  // namespace

class TokenizerCore::Borrowed {
 public:
  // `bytes`: the size of the text.
  Borrowed(const TokenizerCore& core, size_t bytes) : core_(core), bytes_(bytes) {
    {
      MutexLock lock(&core_.mu_);
      if (!core_.idle_.empty()) {
        work_ = std::move(core_.idle_.back());
        core_.idle_.pop_back();
      }
    }
    if (work_ != nullptr) return;
    work_ = std::make_unique<Work>();
    work_->scratch = core_.model_->NewScratch();
  }
  ~Borrowed() {
    // The memory for a large text, up to 40 times its size, is not kept.
    if (bytes_ > kMaxKeptText) return;
    MutexLock lock(&core_.mu_);
    core_.idle_.push_back(std::move(work_));
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  Work& operator*() { return *work_; }

 private:
  static constexpr size_t kMaxKeptText = size_t{256} << 10;

  const TokenizerCore& core_;
  const size_t bytes_;
  std::unique_ptr<Work> work_;
};

absl::StatusOr<std::shared_ptr<TokenizerCore>> TokenizerCore::Make(
    const Json& json, const std::string& path, const std::vector<AddedToken>& more) {
  static const auto* const kNothing = new Json;
  Settings settings(json, path);
  const auto field = [&](absl::string_view name) -> const Json& {
    const Json* const found = settings.Find(name);
    return found == nullptr ? *kNothing : *found;
  };
  const std::string version = settings.MaybeString("version").value_or("1.0");
  MUSTER_RETURN_IF_ERROR(settings.status());
  if (version != "1.0") {
    return settings.NotSupported(absl::StrCat("version '", Printable(version), "'"));
  }
  auto core = std::make_shared<TokenizerCore>();
  MUSTER_ASSIGN_OR_RETURN(core->normalizer_,
                          MakeNormalizer(field("normalizer"), settings.PathOf("normalizer")));
  MUSTER_ASSIGN_OR_RETURN(core->pre_tokenizer_, MakePreTokenizer(field("pre_tokenizer"),
                                                                 settings.PathOf("pre_tokenizer")));
  MUSTER_ASSIGN_OR_RETURN(core->model_, MakeModel(field("model"), settings.PathOf("model")));
  MUSTER_ASSIGN_OR_RETURN(
      core->post_processor_,
      MakePostProcessor(field("post_processor"), settings.PathOf("post_processor")));
  MUSTER_ASSIGN_OR_RETURN(core->decoder_,
                          Decoder::Make(field("decoder"), settings.PathOf("decoder")));
  MUSTER_ASSIGN_OR_RETURN(
      core->added_tokens_,
      AddedTokens::Make(field("added_tokens"), settings.PathOf("added_tokens"),
                        core->model_->vocabulary(), core->normalizer_.get(), more));
  MUSTER_ASSIGN_OR_RETURN(core->truncation_,
                          ReadTruncation(field("truncation"), settings.PathOf("truncation")));
  MUSTER_ASSIGN_OR_RETURN(core->padding_,
                          ReadPadding(field("padding"), settings.PathOf("padding")));
  MUSTER_RETURN_IF_ERROR(settings.Finish());
  core->splitter_ = core->pre_tokenizer_.get();
  core->reader_ = core->model_.get();
  if (core->splitter_ != nullptr && core->splitter_->WithoutByteAlphabet() != nullptr &&
      core->reader_->OfBytes() != nullptr) {
    core->splitter_ = core->splitter_->WithoutByteAlphabet();
    core->reader_ = core->reader_->OfBytes();
  }
  return core;
}

absl::StatusOr<SplitText> TokenizerCore::SplitWords(absl::string_view text) const {
  if (text.size() > kMaxTextBytes) {
    return absl::ResourceExhaustedError(absl::StrCat("a text of ", text.size(),
                                                     " bytes is larger than the ", kMaxTextBytes,
                                                     " allowed; encode it in parts"));
  }
  if (!IsValidUtf8(text)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the text is not UTF-8: \"", Printable(text, 60), "\""));
  }
  MUSTER_ASSIGN_OR_RETURN(SplitText split, added_tokens_.Extract(text, normalizer_.get()));
  if (splitter_ != nullptr) MUSTER_RETURN_IF_ERROR(splitter_->Split(split));
  return split;
}

absl::Status TokenizerCore::TokenizeSpan(const SplitText& split, const Span& span,
                                         Work& work) const {
  if (span.added_id < 0) {
    return reader_->Tokenize(split.TextOf(span), *work.scratch, work.tokens);
  }
  work.tokens.push_back({static_cast<uint32_t>(span.added_id), 0, span.size(), true});
  return absl::OkStatus();
}

absl::StatusOr<Encoding> TokenizerCore::EncodeOne(absl::string_view text, int64_t type_id) const {
  MUSTER_ASSIGN_OR_RETURN(const SplitText split, SplitWords(text));
  Borrowed borrowed(*this, split.aligned.text.size());
  Work& work = *borrowed;
  struct Part {
    const Span* span;
    size_t begin;  // of its tokens in work.tokens
    size_t end;
  };
  std::vector<Part> parts;
  parts.reserve(split.spans.size());
  work.tokens.clear();
  for (const Span& span : split.spans) {
    const size_t begin = work.tokens.size();
    MUSTER_RETURN_IF_ERROR(TokenizeSpan(split, span, work));
    parts.push_back({&span, begin, work.tokens.size()});
  }

  const CodePoints points(text);
  const size_t count = work.tokens.size();
  Encoding encoding;
  encoding.ids.reserve(count);
  encoding.tokens.reserve(count);
  encoding.offsets.reserve(count);
  for (const Part& part : parts) {
    const Span& span = *part.span;
    for (size_t i = part.begin; i < part.end; ++i) {
      const Token& token = work.tokens[i];
      encoding.ids.push_back(token.id);
      if (token.unknown) {
        encoding.tokens.emplace_back(split.aligned.text, span.begin + token.begin,
                                     token.end - token.begin);
      } else {
        encoding.tokens.push_back(*model_->vocabulary().Text(token.id));
      }
      // If the model omits parts of a word, ranges may reach beyond it.
      ByteRange range = {token.begin, token.end};
      if (token.begin < token.end && token.end <= span.size()) {
        range = split.aligned.OriginalOf(span.begin + token.begin, span.begin + token.end);
      }
      encoding.offsets.push_back(points.Convert(range.begin, range.end));
    }
  }
  encoding.type_ids.assign(count, type_id);
  encoding.special_tokens_mask.assign(count, 0);
  encoding.attention_mask.assign(count, 1);
  return encoding;
}

absl::Status TokenizerCore::Check(const Truncation& truncation, const AddedTokenCounts& added,
                                  bool of_file) const {
  if (truncation.max_length < 0 || truncation.stride < 0) {
    return absl::InvalidArgumentError(absl::StrCat("truncation: max_length ", truncation.max_length,
                                                   " and stride ", truncation.stride,
                                                   " must not be negative"));
  }
  if (truncation.max_length < added.here) {
    return absl::InvalidArgumentError(
        absl::StrCat("truncation: max_length is ", truncation.max_length,
                     ", but the template alone adds ", added.here, " special tokens"));
  }
  const auto stuck = [&truncation](int64_t special, absl::string_view where) {
    return absl::InvalidArgumentError(absl::StrCat(
        "truncation: a stride of ", truncation.stride, " leaves no progress in windows of ",
        truncation.max_length - special, " tokens (max_length ", truncation.max_length, " less ",
        special, " special ones", where, ")"));
  };
  // If only special tokens fit, a text is one window after them, and need not advance.
  const int64_t length = truncation.max_length - added.here;
  if (length > 0 && truncation.stride >= length) return stuck(added.here, "");
  // The tokenizers library accepts no stride larger than the room for a single text, even for
  // encoding pairs; it does not check what its file says.
  if (!of_file && truncation.stride > std::max<int64_t>(0, truncation.max_length - added.single)) {
    return stuck(added.single, added.here == added.single ? "" : " of a single text");
  }
  return absl::OkStatus();
}

absl::StatusOr<Encoding> TokenizerCore::Encode(const TextInput& input,
                                               const EncodeOptions& options) const {
  std::optional<Truncation> truncation = options.truncation;
  const bool of_file = !truncation.has_value();
  if (of_file && options.limits_of_file) truncation = truncation_;
  const bool is_pair = input.pair.has_value();
  AddedTokenCounts added;
  if (post_processor_ != nullptr && options.add_special_tokens) {
    added = {.here = post_processor_->AddedTokens(is_pair),
             .single = post_processor_->AddedTokens(/*is_pair=*/false)};
  }
  if (truncation.has_value()) MUSTER_RETURN_IF_ERROR(Check(*truncation, added, of_file));

  std::vector<Encoding> parts;
  MUSTER_ASSIGN_OR_RETURN(Encoding first, EncodeOne(input.text, 0));
  parts.push_back(std::move(first));
  if (is_pair) {
    MUSTER_ASSIGN_OR_RETURN(Encoding second, EncodeOne(*input.pair, 1));
    parts.push_back(std::move(second));
  }
  if (truncation.has_value()) {
    MUSTER_RETURN_IF_ERROR(Truncate(parts[0], is_pair ? &parts[1] : nullptr,
                                    truncation->max_length - added.here, *truncation));
  }
  if (post_processor_ != nullptr) post_processor_->Process(parts, options.add_special_tokens);
  double windows = 1;
  for (const Encoding& part : parts)
    windows *= 1.0 + 2.0 * static_cast<double>(part.overflowing.size());
  if (windows > kMaxWindows) {
    return absl::ResourceExhaustedError(
        absl::StrCat("truncation: the windows of this input combine to more than ", kMaxWindows));
  }
  if (parts.empty()) return Encoding();
  Encoding whole = std::move(parts[0]);
  for (size_t i = 1; i < parts.size(); ++i) Append(whole, parts[i]);
  return whole;
}

absl::StatusOr<std::vector<int64_t>> TokenizerCore::EncodeIds(absl::string_view text,
                                                              bool add_special_tokens) const {
  MUSTER_ASSIGN_OR_RETURN(const SplitText split, SplitWords(text));
  Borrowed borrowed(*this, split.aligned.text.size());
  Work& work = *borrowed;
  work.tokens.clear();
  for (const Span& span : split.spans) MUSTER_RETURN_IF_ERROR(TokenizeSpan(split, span, work));
  std::vector<Encoding> parts(1);
  std::vector<int64_t>& ids = parts[0].ids;
  ids.reserve(work.tokens.size() + 2);
  for (const Token& token : work.tokens) ids.push_back(token.id);
  if (post_processor_ == nullptr || !add_special_tokens) return std::move(ids);
  // The processors read the other lists only to change them.
  parts[0].tokens.resize(ids.size());
  parts[0].offsets.resize(ids.size());
  post_processor_->Process(parts, true);
  if (parts.size() == 1) return std::move(parts[0].ids);
  std::vector<int64_t> whole;
  for (const Encoding& part : parts) whole.insert(whole.end(), part.ids.begin(), part.ids.end());
  return whole;
}

absl::Status TokenizerCore::Push(DecodeChain& chain, int64_t id, bool skip_special_tokens) const {
  const AddedToken* const added = added_tokens_.Find(id);
  const std::string* const text = IdToToken(id);
  if (text == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("the id ", id, " is not in the vocabulary of ", VocabSize(true), " tokens"));
  }
  if (skip_special_tokens) {
    const AddedToken* const known = added != nullptr ? added : added_tokens_.Find(*text);
    if (known != nullptr && known->special) return absl::OkStatus();
  }
  chain.Push(*text, added != nullptr);
  return absl::OkStatus();
}

std::optional<int64_t> TokenizerCore::TokenToId(absl::string_view token) const {
  if (const AddedToken* const added = added_tokens_.Find(token); added != nullptr) return added->id;
  return model_->vocabulary().Id(token);
}

const std::string* TokenizerCore::IdToToken(int64_t id) const {
  if (const AddedToken* const added = added_tokens_.Find(id); added != nullptr) {
    return &added->content;
  }
  if (id < 0 || id > std::numeric_limits<uint32_t>::max()) return nullptr;
  return model_->vocabulary().Text(static_cast<uint32_t>(id));
}

int64_t TokenizerCore::VocabSize(bool with_added_tokens) const {
  auto size = static_cast<int64_t>(model_->vocabulary().size());
  if (!with_added_tokens) return size;
  for (const AddedToken& token : added_tokens_.tokens()) {
    if (!model_->vocabulary().Id(token.content).has_value()) ++size;
  }
  return size;
}

}  // namespace muster::text
