//! Long texts in windows, with the same tokens as the whole: the library needs some hundred bytes of memory for every
//! byte of text it holds at once, and texts of many megabytes do occur.
//!
//! A byte-level tokenizer cuts a text into words by a regular expression that runs from left to right; what follows a
//! border between two words depends only on the text after it. So a window may begin at any such border of the one
//! before. Borders near the end of a window are not trusted, since the text that was cut off could have moved them.

use serde_json::Value;

use super::Encoded;

/// Sizes of a window in bytes of text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    /// Text that is encoded at once.
    pub bytes: usize,
    /// Text at its end whose borders are not trusted.
    pub margin: usize,
}

/// Words that must lie between a trusted border and the end of its window, whatever their length: what is cut off can
/// change the last word and the white space before it.
const MARGIN_WORDS: u32 = 8;

pub(super) const WINDOW: Window = Window { bytes: 1 << 20, margin: 1 << 14 };

/// Whether a tokenizer works from left to right word by word, and adds nothing at the beginning of a text: no
/// normalizer but NFC, and words cut by expressions without look-behind for byte-level BPE.
pub(super) fn applies(tokenizer: &tokenizers::Tokenizer) -> bool {
    let Ok(json) = serde_json::to_value(tokenizer) else { return false };
    let kind = |v: &Value| v.get("type").and_then(Value::as_str).map(String::from);
    let normalizer = json.get("normalizer").and_then(kind);
    let words = json.get("pre_tokenizer").map(|p| match p.get("pretokenizers").and_then(Value::as_array) {
        Some(list) => list.clone(),
        None => vec![p.clone()],
    });
    let plain = |p: &Value| match kind(p).as_deref() {
        Some("ByteLevel") => p.get("add_prefix_space") == Some(&Value::Bool(false)),
        Some("Split") => !p.to_string().contains("(?<"),
        Some("Digits") => true,
        _ => false,
    };
    let byte_level = |list: &Vec<Value>| list.iter().any(|p| kind(p).as_deref() == Some("ByteLevel"));
    matches!(normalizer.as_deref(), None | Some("NFC")) && words.is_some_and(|w| byte_level(&w) && w.iter().all(plain))
}

/// Encodes a text in windows.
pub(super) fn encode(tokenizer: &tokenizers::Tokenizer, text: &str, window: Window) -> tokenizers::Result<Encoded> {
    let mut out = Encoded::default();
    let (mut from, mut size) = (0_usize, window.bytes);
    loop {
        let mut to = from.saturating_add(size).min(text.len());
        while !text.is_char_boundary(to) {
            to += 1;
        }
        let encoding = tokenizer.encode(&text[from..to], false)?;
        let last = to == text.len();
        let kept = if last { encoding.len() } else { trusted(&encoding, (to - from).saturating_sub(window.margin)) };
        if kept == 0 && !last {
            // One word fills the window.
            size = size.saturating_mul(2);
            continue;
        }
        let offset = |x: usize| u32::try_from(from + x).unwrap_or(u32::MAX);
        out.ids.extend_from_slice(&encoding.get_ids()[..kept]);
        out.offsets.extend(encoding.get_offsets()[..kept].iter().map(|(a, b)| (offset(*a), offset(*b))));
        if last {
            return Ok(out);
        }
        from += encoding.get_offsets().get(kept).map_or(to - from, |o| o.0);
        size = window.bytes;
    }
}

/// Number of tokens before the last word border at or before byte `limit` that enough words follow.
fn trusted(encoding: &tokenizers::Encoding, limit: usize) -> usize {
    let (words, offsets) = (encoding.get_word_ids(), encoding.get_offsets());
    let Some(last) = words.last().copied().flatten() else { return 0 };
    let border = |i: &usize| {
        let (before, after) = (words[i - 1], words[*i]);
        // Bytes between two words (dropped white space) would make the next window begin elsewhere.
        before != after && offsets[i - 1].1 == offsets[*i].0 && offsets[*i].0 <= limit && after.is_some_and(|w| w + MARGIN_WORDS <= last)
    };
    (1..words.len()).rev().find(border).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{qwen3, tiny};
    use proptest::prelude::*;

    fn whole(tokenizer: &crate::Tokenizer, text: &str) -> Encoded {
        encode(&tokenizer.inner, text, Window { bytes: usize::MAX / 2, margin: 0 }).unwrap()
    }

    fn text() -> impl Strategy<Value = String> {
        let pieces = prop::sample::select(vec![
            "the ",
            "river",
            " ",
            "  ",
            "\n",
            " \n",
            "\r\n",
            "1",
            "42",
            "'s",
            "!",
            "...",
            "é",
            "e\u{301}",
            "河",
            "\u{1F916}",
            "<|im_start|>",
            "<|im_end|>",
            "<|im_",
            "\t",
        ]);
        prop::collection::vec(pieces, 0..400).prop_map(|p| p.concat())
    }

    proptest! {
        #[test]
        fn windows_give_the_tokens_of_the_whole(text in text(), bytes in 80_usize..300) {
            let tokenizer = tiny();
            prop_assert!(applies(&tokenizer.inner));
            let got = encode(&tokenizer.inner, &text, Window { bytes, margin: 16 }).unwrap();
            prop_assert_eq!(got, whole(&tokenizer, &text));
        }
    }

    #[test]
    fn one_long_word_and_long_white_space_are_kept_whole() {
        let tokenizer = tiny();
        for text in ["a".repeat(5000), " ".repeat(5000) + "x", "x".to_string() + &"\n ".repeat(3000) + "y z"] {
            let got = encode(&tokenizer.inner, &text, Window { bytes: 200, margin: 16 }).unwrap();
            assert_eq!(got, whole(&tokenizer, &text));
        }
    }

    #[test]
    fn the_real_tokenizer_agrees_too() {
        let Some(tokenizer) = qwen3() else { return };
        let words = ["Hello", " world", "\n\n", " 河流", "12", "<|im_end|>", "  ", "don't", " é", "\t", "."];
        let text: String = (0..20_000_usize).map(|i| words[(i * i / 7 + i) % words.len()]).collect();
        assert!(applies(&tokenizer.inner));
        let got = encode(&tokenizer.inner, &text, Window { bytes: 4096, margin: 256 }).unwrap();
        assert_eq!(got, whole(tokenizer, &text));
    }
}
