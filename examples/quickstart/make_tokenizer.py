#!/usr/bin/env python3
"""Trains model/tokenizer.json, a byte-level BPE, on the chat set. Needs `pip install tokenizers`.

    python3 make_tokenizer.py
"""
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

HERE = Path(__file__).parent
SIZE = 1536
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# A word with its leading space, a single digit, a run of punctuation, line ends, other white space.
WORDS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+"

tokenizer = Tokenizer(models.BPE())
tokenizer.normalizer = normalizers.NFC()
tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
)
tokenizer.decoder = decoders.ByteLevel()
texts = ["system\n", "user\n", "assistant\n"]
for name in ("chat.jsonl", "facts.jsonl"):
    for line in (HERE / name).read_text(encoding="utf-8").splitlines():
        texts += [message["content"] for message in json.loads(line)["messages"]]
trainer = trainers.BpeTrainer(
    vocab_size=SIZE - len(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
)
tokenizer.train_from_iterator(texts, trainer)
tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
tokenizer.save(str(HERE / "model" / "tokenizer.json"), pretty=False)
