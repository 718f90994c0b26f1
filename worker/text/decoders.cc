#include "worker/text/decoders.h"

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/text/byte_alphabet.h"
#include "worker/text/pattern.h"
#include "worker/text/settings.h"
#include "worker/text/unicode.h"

namespace muster::text {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 16;
constexpr size_t kMaxSteps = 64;
constexpr absl::string_view kReplacement = "\xEF\xBF\xBD";

// The end of the chain.
class Sink final : public DecodeStep {
 public:
  Sink(std::string& out, bool separated) : out_(out), separated_(separated) {}
  void Begin(bool) override {
    if (separated_ && !first_) out_ += ' ';
    first_ = false;
  }
  void Text(absl::string_view part) override { out_.append(part.data(), part.size()); }
  void End() override {}
  void Finish() override {}

 private:
  std::string& out_;
  const bool separated_;
  bool first_ = true;
};

void PutToken(DecodeStep& next, absl::string_view text, bool added = false) {
  next.Begin(added);
  next.Text(text);
  next.End();
}

// A step that looks at whole tokens.
class WholeTokens : public DecodeStep {
 public:
  explicit WholeTokens(DecodeStep& next) : next_(next) {}
  void Begin(bool added) final {
    added_ = added;
    token_.clear();
  }
  void Text(absl::string_view part) final { token_.append(part.data(), part.size()); }
  void End() final { Token(token_, added_); }
  void Finish() override { next_.Finish(); }

 protected:
  virtual void Token(std::string& token, bool added) = 0;

  DecodeStep& next_;

 private:
  std::string token_;
  bool added_ = false;
};

// The bytes that all replacements of one step may add: a file may have many steps, each of which
// repeats what the previous one has repeated.
class Budget {
 public:
  explicit Budget(absl::Status& status) : status_(status) {}

  // Returns false, with an error in the status, if this or another step's budget is used up.
  bool Take(size_t bytes) {
    used_ += bytes;
    if (used_ > kMost) {
      status_.Update(absl::ResourceExhaustedError(
          absl::StrCat("the replacements of a decoder add more than ", kMost, " bytes")));
    }
    return status_.ok();
  }

 private:
  static constexpr size_t kMost = size_t{64} << 20;

  absl::Status& status_;
  size_t used_ = 0;
};

// Replaces a text by another, as soon as it is known that it is complete.
class ReplaceText final : public DecodeStep {
 public:
  ReplaceText(DecodeStep& next, std::string wanted, std::string content, absl::Status& status)
      : next_(next), wanted_(std::move(wanted)), content_(std::move(content)), budget_(status) {}

  void Begin(bool added) override { next_.Begin(added); }
  void Text(absl::string_view part) override {
    held_.append(part.data(), part.size());
    absl::string_view rest = held_;
    for (size_t at = rest.find(wanted_); at != absl::string_view::npos; at = rest.find(wanted_)) {
      const size_t added = content_.size() - std::min(content_.size(), wanted_.size());
      if (!budget_.Take(added)) return;
      if (at > 0) next_.Text(rest.substr(0, at));
      if (!content_.empty()) next_.Text(content_);
      rest.remove_prefix(at + wanted_.size());
    }
    size_t keep = std::min(rest.size(), wanted_.size() - 1);
    while (!absl::EndsWith(rest, absl::string_view(wanted_).substr(0, keep))) --keep;
    if (rest.size() > keep) next_.Text(rest.substr(0, rest.size() - keep));
    held_ = std::string(rest.substr(rest.size() - keep));
  }
  void End() override {
    if (!held_.empty()) next_.Text(held_);
    held_.clear();
    next_.End();
  }
  void Finish() override { next_.Finish(); }

 private:
  DecodeStep& next_;
  const std::string wanted_;
  const std::string content_;
  Budget budget_;
  std::string held_;  // may be the start of the wanted text
};

class ReplacePattern final : public WholeTokens {
 public:
  ReplacePattern(DecodeStep& next, const Pattern& pattern, std::string content,
                 absl::Status& status)
      : WholeTokens(next),
        pattern_(pattern),
        content_(std::move(content)),
        status_(status),
        budget_(status) {}

 private:
  void Token(std::string& token, bool added) override {
    std::vector<Piece> pieces;
    status_.Update(pattern_.Find(token, pieces));
    if (!budget_.Take(content_.empty() ? 0 : pieces.size() * (content_.size() - 1))) return;
    next_.Begin(added);
    for (const Piece& piece : pieces) {
      next_.Text(piece.match
                     ? absl::string_view(content_)
                     : absl::string_view(token).substr(piece.begin, piece.end - piece.begin));
    }
    next_.End();
  }

  const Pattern& pattern_;
  const std::string content_;
  absl::Status& status_;
  Budget budget_;
};

// Decodes tokens of single bytes. A run of them that is not UTF-8 becomes one U+FFFD for each byte,
// so nothing of it is known before its end.
class ByteFallback final : public DecodeStep {
 public:
  explicit ByteFallback(DecodeStep& next) : next_(next) {}
  void Begin(bool added) override {
    added_ = added;
    passing_ = false;
    token_.clear();
  }
  void Text(absl::string_view part) override {
    if (passing_) return next_.Text(part);
    token_.append(part.data(), part.size());
    if (token_.size() > 6) Pass();
  }
  void End() override {
    if (const int byte = passing_ ? -1 : ByteOf(token_); byte >= 0) {
      run_ += static_cast<char>(byte);
      return;
    }
    if (!passing_) Pass();
    next_.End();
  }
  void Finish() override {
    PutRun();
    next_.Finish();
  }

 private:
  static int ByteOf(absl::string_view token) {
    const auto digit = [](char c) {
      const auto u = static_cast<unsigned char>(c);
      return absl::ascii_isdigit(u) ? c - '0' : absl::ascii_tolower(u) - 'a' + 10;
    };
    if (token.size() != 6 || !absl::StartsWith(token, "<0x") || token[5] != '>') return -1;
    if (!absl::ascii_isxdigit(static_cast<unsigned char>(token[3])) ||
        !absl::ascii_isxdigit(static_cast<unsigned char>(token[4]))) {
      return -1;
    }
    return digit(token[3]) * 16 + digit(token[4]);
  }
  void Pass() {
    PutRun();
    passing_ = true;
    next_.Begin(added_);
    if (!token_.empty()) next_.Text(token_);
  }
  void PutRun() {
    if (IsValidUtf8(run_)) {
      if (!run_.empty()) PutToken(next_, run_);
    } else {
      for (size_t i = 0; i < run_.size(); ++i) PutToken(next_, kReplacement);
    }
    run_.clear();
  }

  DecodeStep& next_;
  std::string token_;
  std::string run_;
  bool added_ = false;
  bool passing_ = false;  // the token is not one of a byte, and is passed on
};

// Joins all tokens into one.
class Fuse final : public DecodeStep {
 public:
  explicit Fuse(DecodeStep& next) : next_(next) {}
  void Begin(bool) override {
    if (!begun_) next_.Begin(false);
    begun_ = true;
  }
  void Text(absl::string_view part) override { next_.Text(part); }
  void End() override {}
  void Finish() override {
    Begin(false);
    next_.End();
    next_.Finish();
  }

 private:
  DecodeStep& next_;
  bool begun_ = false;
};

// Removes a character up to `start` times from the front of each token.
class StripStart final : public DecodeStep {
 public:
  StripStart(DecodeStep& next, std::string character, int64_t start)
      : next_(next), character_(std::move(character)), start_(start) {}
  void Begin(bool added) override {
    left_ = start_;
    next_.Begin(added);
  }
  void Text(absl::string_view part) override {
    while (left_ > 0 && !part.empty()) {
      if (!absl::StartsWith(part, character_)) {
        left_ = 0;
        break;
      }
      part.remove_prefix(character_.size());
      --left_;
    }
    if (!part.empty()) next_.Text(part);
  }
  void End() override { next_.End(); }
  void Finish() override { next_.Finish(); }

 private:
  DecodeStep& next_;
  const std::string character_;
  const int64_t start_;
  int64_t left_ = 0;
};

class StripEnd final : public WholeTokens {
 public:
  StripEnd(DecodeStep& next, std::string character, int64_t stop)
      : WholeTokens(next), character_(std::move(character)), stop_(stop) {}

 private:
  void Token(std::string& token, bool added) override {
    absl::string_view text = token;
    for (int64_t i = 0; i < stop_ && absl::EndsWith(text, character_); ++i) {
      text.remove_suffix(character_.size());
    }
    PutToken(next_, text, added);
  }

  const std::string character_;
  const int64_t stop_;
};

// The "cleanup of tokenization artifacts" of Hugging Face's libraries. The order matters.
void CleanUp(std::string& text) {
  // Nearly all tokens have none of these.
  bool any = false;
  for (size_t at = text.find(' '); at != std::string::npos && !any; at = text.find(' ', at + 1)) {
    any = at + 1 < text.size() &&
          absl::string_view(".?!,'nd").find(text[at + 1]) != absl::string_view::npos;
  }
  if (!any) return;
  static constexpr std::pair<absl::string_view, absl::string_view> kReplacements[] = {
      {" .", "."},   {" ?", "?"},     {" !", "!"},     {" ,", ","},
      {" ' ", "'"},  {" n't", "n't"}, {" 'm", "'m"},   {" do not", " don't"},
      {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"},
  };
  for (const auto& [from, to] : kReplacements) {
    absl::StrReplaceAll({{from, to}}, &text);
  }
}

// Puts blanks between the tokens that begin words.
class WordPiece final : public WholeTokens {
 public:
  WordPiece(DecodeStep& next, std::string prefix, bool cleanup)
      : WholeTokens(next), prefix_(std::move(prefix)), cleanup_(cleanup) {}

 private:
  void Token(std::string& token, bool added) override {
    if (!first_) {
      if (absl::StartsWith(token, prefix_)) {
        token.erase(0, prefix_.size());
      } else {
        token = absl::StrCat(" ", token);
      }
    }
    first_ = false;
    if (cleanup_) CleanUp(token);
    PutToken(next_, token, added);
  }

  const std::string prefix_;
  const bool cleanup_;
  bool first_ = true;
};

// Replaces the mark of a blank by a blank, or in the first token by nothing if one was put before
// the text.
class Metaspace final : public DecodeStep {
 public:
  Metaspace(DecodeStep& next, std::string replacement, bool prepends)
      : next_(next), replacement_(std::move(replacement)), leave_out_(prepends) {}
  void Begin(bool added) override { next_.Begin(added); }
  void Text(absl::string_view part) override {
    for (size_t at = part.find(replacement_); at != absl::string_view::npos;
         at = part.find(replacement_)) {
      if (at > 0) next_.Text(part.substr(0, at));
      if (!leave_out_) next_.Text(" ");
      part.remove_prefix(at + replacement_.size());
    }
    if (!part.empty()) next_.Text(part);
  }
  void End() override {
    leave_out_ = false;
    next_.End();
  }
  void Finish() override { next_.Finish(); }

 private:
  DecodeStep& next_;
  const std::string replacement_;
  bool leave_out_;
};

// Replaces the mark of a word's end by a blank, except in the last word.
class BpeDecoder final : public WholeTokens {
 public:
  BpeDecoder(DecodeStep& next, std::string suffix)
      : WholeTokens(next), suffix_(std::move(suffix)) {}
  void Finish() override {
    Put("");
    next_.Finish();
  }

 private:
  void Token(std::string& token, bool added) override {
    Put(" ");
    held_ = token;
    held_added_ = added;
    holds_ = true;
  }
  void Put(absl::string_view instead) {
    if (!holds_) return;
    if (!suffix_.empty()) absl::StrReplaceAll({{suffix_, instead}}, &held_);
    PutToken(next_, held_, held_added_);
    holds_ = false;
  }

  const std::string suffix_;
  std::string held_;
  bool held_added_ = false;
  bool holds_ = false;
};

// Decodes tokens of time steps: drops repetitions and CTC blanks.
class Ctc final : public WholeTokens {
 public:
  Ctc(DecodeStep& next, std::string pad, std::string delimiter, bool cleanup)
      : WholeTokens(next),
        pad_(std::move(pad)),
        delimiter_(std::move(delimiter)),
        cleanup_(cleanup) {}

 private:
  void Token(std::string& token, bool added) override {
    if (!first_ && token == last_) return;
    first_ = false;
    last_ = token;
    if (!pad_.empty()) absl::StrReplaceAll({{pad_, ""}}, &token);
    if (cleanup_) {
      CleanUp(token);
      if (!delimiter_.empty()) absl::StrReplaceAll({{delimiter_, " "}}, &token);
    }
    if (!token.empty()) PutToken(next_, token, added);
  }

  const std::string pad_;
  const std::string delimiter_;
  const bool cleanup_;
  std::string last_;
  bool first_ = true;
};

// Decodes the bytes that tokens stand for as UTF-8. Added tokens stand for themselves.
class ByteLevel final : public WholeTokens {
 public:
  explicit ByteLevel(DecodeStep& next) : WholeTokens(next) {}
  void Finish() override {
    Put("", true);
    next_.End();
    next_.Finish();
  }

 private:
  void Token(std::string& token, bool added) override {
    if (added) return Put(token, false);
    bytes_.clear();
    for (size_t at = 0; at < token.size();) {
      const int byte = ByteOfCharacter(NextCharacter(token, at));
      if (byte < 0) return Put(token, false);
      bytes_ += static_cast<char>(byte);
    }
    Put(bytes_, false);
  }
  void Put(absl::string_view bytes, bool final) {
    if (!begun_) next_.Begin(false);
    begun_ = true;
    text_.clear();
    AppendUtf8Lossy(text_, pending_, bytes, final);
    if (!text_.empty()) next_.Text(text_);
  }

  std::string bytes_;
  std::string pending_;  // an incomplete character
  std::string text_;
  bool begun_ = false;
};

using StepMaker = Decoder::StepMaker;

// Returns a maker of steps of type Step, which is given copies of `arguments`.
template <typename Step, typename... Arguments>
StepMaker MakerOf(Arguments... arguments) {
  return [arguments...](DecodeStep& next, absl::Status&) {
    return std::make_unique<Step>(next, arguments...);
  };
}

absl::StatusOr<StepMaker> MakeReplace(Settings& settings) {
  const Json* const field = settings.Find("pattern");
  const std::string content = settings.String("content");
  if (field != nullptr && field->is_object() && field->size() == 1 && field->contains("String") &&
      field->at("String").is_string() && field->at("String") != "") {
    const auto wanted = field->at("String").get<std::string>();
    return StepMaker([wanted, content](DecodeStep& next, absl::Status& status) {
      return std::make_unique<ReplaceText>(next, wanted, content, status);
    });
  }
  MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<Pattern> made, MakePattern(settings));
  const std::shared_ptr<const Pattern> pattern = std::move(made);
  return StepMaker([pattern, content](DecodeStep& next, absl::Status& status) {
    return std::make_unique<ReplacePattern>(next, *pattern, content, status);
  });
}

absl::StatusOr<StepMaker> MakeMetaspace(Settings& settings) {
  const std::string replacement = settings.Character("replacement");
  const size_t scheme = settings.Choice("prepend_scheme", {"first", "always", "never"}, 1);
  const bool never = !settings.Bool("add_prefix_space", true);
  settings.Ignore("str_rep");
  settings.Ignore("split");
  return MakerOf<Metaspace>(replacement, scheme != 2 && !never);
}

absl::Status Collect(const Json& json, const std::string& path, int depth,
                     std::vector<StepMaker>& steps);

absl::StatusOr<StepMaker> MakeStep(Settings& settings, const std::string& type) {
  if (type == "ByteLevel") {
    for (const char* const name : {"add_prefix_space", "trim_offsets", "use_regex"}) {
      settings.Ignore(name);  // settings of the pre-tokenizer and the post-processor
    }
    return MakerOf<ByteLevel>();
  }
  if (type == "Replace") return MakeReplace(settings);
  if (type == "ByteFallback") return MakerOf<ByteFallback>();
  if (type == "Fuse") return MakerOf<Fuse>();
  if (type == "WordPiece") {
    const std::string prefix = settings.String("prefix");
    return MakerOf<WordPiece>(prefix, settings.Bool("cleanup"));
  }
  if (type == "Metaspace") return MakeMetaspace(settings);
  if (type == "BPEDecoder") return MakerOf<BpeDecoder>(settings.String("suffix"));
  if (type == "CTC") {
    const std::string pad = settings.String("pad_token");
    const std::string delimiter = settings.String("word_delimiter_token");
    return MakerOf<Ctc>(pad, delimiter, settings.Bool("cleanup"));
  }
  return settings.NotSupported(absl::StrCat("type '", Printable(type), "'"));
}

absl::Status CollectStrip(Settings& settings, std::vector<StepMaker>& steps) {
  constexpr int64_t kMost = int64_t{1} << 31;
  const std::string content = settings.Character("content");
  const int64_t start = settings.Count("start", kMost);
  const int64_t stop = settings.Count("stop", kMost);
  steps.push_back(MakerOf<StripStart>(content, start));
  if (stop > 0) steps.push_back(MakerOf<StripEnd>(content, stop));
  return settings.Finish();
}

absl::Status Collect(const Json& json, const std::string& path, int depth,
                     std::vector<StepMaker>& steps) {
  Settings settings(json, path);
  const std::string type = settings.Type();
  MUSTER_RETURN_IF_ERROR(settings.status());
  if (depth > kMaxDepth || steps.size() > kMaxSteps) {
    return settings.NotSupported("nesting this deep");
  }
  if (type == "Strip") return CollectStrip(settings, steps);
  if (type != "Sequence") {
    MUSTER_ASSIGN_OR_RETURN(StepMaker step, MakeStep(settings, type));
    steps.push_back(std::move(step));
    return settings.Finish();
  }
  size_t index = 0;
  for (const Json& part : settings.List("decoders")) {
    MUSTER_RETURN_IF_ERROR(Collect(
        part, absl::StrCat(settings.PathOf("decoders"), "[", index++, "]"), depth + 1, steps));
  }
  return settings.Finish();
}

}  // namespace

absl::StatusOr<Decoder> Decoder::Make(const Json& json, const std::string& path) {
  Decoder decoder;
  decoder.separated_ = json.is_null();
  if (!json.is_null()) MUSTER_RETURN_IF_ERROR(Collect(json, path, 0, decoder.steps_));
  return decoder;
}

DecodeChain Decoder::NewChain() const {
  DecodeChain chain;
  chain.steps_.push_back(std::make_unique<Sink>(*chain.out_, separated_));
  for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
    chain.steps_.push_back((*step)(*chain.steps_.back(), *chain.status_));
  }
  chain.first_ = chain.steps_.back().get();
  return chain;
}

void DecodeChain::Push(absl::string_view token, bool added) { PutToken(*first_, token, added); }

absl::StatusOr<std::string> DecodeChain::Take() {
  if (!status_->ok()) return *status_;
  return std::exchange(*out_, std::string());
}

}  // namespace muster::text
