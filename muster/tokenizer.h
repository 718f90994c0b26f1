#ifndef MUSTER_TOKENIZER_H_
#define MUSTER_TOKENIZER_H_

// muster::Tokenizer converts text to tokens and back according to a tokenizer.json. It needs
// neither torch nor ICU's headers. docs/tokenizers.md lists what it can read.

#include "worker/text/encoding.h"
#include "worker/text/tokenizer.h"

#endif  // MUSTER_TOKENIZER_H_
