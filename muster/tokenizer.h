#ifndef MUSTER_TOKENIZER_H_
#define MUSTER_TOKENIZER_H_

// muster::Tokenizer: text to tokens and back, as a tokenizer.json says. It needs neither torch nor
// ICU's headers. docs/tokenizers.md says what it can read.

#include "worker/text/encoding.h"
#include "worker/text/tokenizer.h"

#endif  // MUSTER_TOKENIZER_H_
