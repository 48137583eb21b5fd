//! From tokens to text that may be shown, and stop strings.

/// Turns tokens into text. Special tokens should be left out; bytes that are no UTF-8 become U+FFFD.
pub(crate) type Decode<'a> = dyn Fn(&[u32]) -> String + 'a;

const UNFINISHED: char = '\u{FFFD}';
/// Most bytes of a UTF-8 character that lacks at least one; some decoders write a replacement character for each.
const LONGEST_UNFINISHED: usize = 3;

/// The text of one answer as it grows.
///
/// Decoding all tokens anew for each token would cost the square of the length, and decoding a token alone is wrong
/// where tokens split a character or a decoder treats the first token differently. So a window is decoded twice,
/// without and with the new tokens, and the difference is the new text; it is taken once it ends in a whole character.
#[derive(Default)]
pub(crate) struct TextStream {
    tokens: Vec<u32>,
    /// First token of the window.
    window: usize,
    /// Tokens whose text was taken.
    taken: usize,
    /// Text taken but not handed out: it may begin a stop string.
    held: String,
}

/// New text of a token.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Piece {
    /// What may be shown.
    pub text: String,
    /// The stop string found, which ends the answer.
    pub stopped_by: Option<String>,
}

impl TextStream {
    /// Adds a token that is not an end token.
    pub fn push(&mut self, token: u32, decode: &Decode, stops: &[String]) -> Piece {
        self.tokens.push(token);
        let text = self.undecided(decode);
        if text.is_empty() || text.ends_with(UNFINISHED) {
            return Piece::default();
        }
        self.window = self.taken;
        self.taken = self.tokens.len();
        self.held.push_str(&text);
        if let Some(stop) = earliest(&self.held, stops) {
            self.held.truncate(stop.0);
            return Piece { text: self.hand_out(self.held.len()), stopped_by: Some(stop.1.clone()) };
        }
        let certain = self.held.len() - longest_start(&self.held, stops);
        Piece { text: self.hand_out(certain), stopped_by: None }
    }

    /// The rest of the text when generation ends for another reason than a stop string: all but an unfinished character.
    pub fn finish(&mut self, decode: &Decode) -> String {
        let text = self.undecided(decode);
        let kept = text.trim_end_matches(UNFINISHED);
        let replaced = text[kept.len()..].chars().count();
        // A longer run cannot be one unfinished character: those bytes are simply not UTF-8, which the text should say.
        self.held.push_str(if replaced <= LONGEST_UNFINISHED { kept } else { &text });
        self.taken = self.tokens.len();
        self.hand_out(self.held.len())
    }

    /// Text of the tokens that were not taken yet.
    fn undecided(&self, decode: &Decode) -> String {
        let before = decode(&self.tokens[self.window..self.taken]);
        let after = decode(&self.tokens[self.window..]);
        after.strip_prefix(before.as_str()).unwrap_or("").to_string()
    }

    fn hand_out(&mut self, bytes: usize) -> String {
        let rest = self.held.split_off(bytes);
        std::mem::replace(&mut self.held, rest)
    }
}

/// The stop string that occurs first, with its place; the longest among those that begin there.
fn earliest<'s>(text: &str, stops: &'s [String]) -> Option<(usize, &'s String)> {
    stops.iter().filter_map(|s| text.find(s.as_str()).map(|at| (at, s))).min_by_key(|(at, s)| (*at, usize::MAX - s.len()))
}

/// Bytes at the end of `text` that could be the beginning of a stop string.
fn longest_start(text: &str, stops: &[String]) -> usize {
    let starts =
        |stop: &String| stop.char_indices().map(|(i, _)| i).rfind(|i| *i <= text.len() && text.ends_with(&stop[..*i])).unwrap_or(0);
    stops.iter().map(starts).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A tokenizer whose tokens are bytes.
    fn bytes(tokens: &[u32]) -> String {
        String::from_utf8_lossy(&tokens.iter().map(|t| *t as u8).collect::<Vec<_>>()).into_owned()
    }

    /// A decoder that, like SentencePiece's byte fall-back, drops a leading blank and replaces every bad byte.
    fn pieces(tokens: &[u32]) -> String {
        let raw: Vec<u8> = tokens.iter().map(|t| *t as u8).collect();
        let text: String = raw.utf8_chunks().map(|c| c.valid().to_string() + &"\u{FFFD}".repeat(c.invalid().len())).collect();
        text.strip_prefix(' ').unwrap_or(&text).to_string()
    }

    fn joined(pieces: &[Piece]) -> String {
        pieces.iter().map(|p| p.text.as_str()).collect()
    }

    fn run(text: &[u8], decode: &Decode, stops: &[&str]) -> (Vec<Piece>, String) {
        let stops: Vec<String> = stops.iter().map(|s| s.to_string()).collect();
        let mut stream = TextStream::default();
        let mut out = Vec::new();
        for b in text {
            out.push(stream.push(u32::from(*b), decode, &stops));
            if out.last().is_some_and(|p| p.stopped_by.is_some()) {
                let shown = joined(&out);
                return (out, shown);
            }
        }
        out.push(Piece { text: stream.finish(decode), stopped_by: None });
        let shown = joined(&out);
        (out, shown)
    }

    #[test]
    fn a_split_character_waits_for_its_last_byte() {
        let (out, shown) = run("a你🙂".as_bytes(), &bytes, &[]);
        let texts: Vec<&str> = out.iter().map(|p| p.text.as_str()).collect();
        assert_eq!(texts, ["a", "", "", "你", "", "", "", "🙂", ""]);
        assert_eq!(shown, "a你🙂");
    }

    #[test]
    fn an_unfinished_last_character_is_never_shown() {
        for cut in 1..=3 {
            let text = &"ok🙂".as_bytes()[..2 + cut];
            assert_eq!(run(text, &bytes, &[]).1, "ok");
            assert_eq!(run(text, &pieces, &[]).1, "ok");
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_not_hidden() {
        assert_eq!(run(b"a\xFFb", &bytes, &[]).1, "a\u{FFFD}b");
    }

    #[test]
    fn stop_strings_are_found_across_tokens_and_never_shown() {
        let (out, shown) = run(b"one\n\nUser: two", &bytes, &["\nUser:", "###"]);
        assert_eq!(shown, "one\n");
        assert_eq!(out.last().map(|p| p.stopped_by.as_deref()), Some(Some("\nUser:")));
        assert!(out.iter().all(|p| !p.text.contains("User")));
    }

    #[test]
    fn a_beginning_that_comes_to_nothing_is_shown() {
        let (out, shown) = run(b"ab#c##", &bytes, &["###"]);
        assert_eq!(shown, "ab#c##");
        assert_eq!(out[2].text, "");
        assert_eq!(out[3].text, "#c");
    }

    #[test]
    fn the_earlier_and_then_the_longer_stop_string_wins() {
        let decode_words = |t: &[u32]| t.iter().map(|_| "xENDSy").collect::<String>();
        let stops: Vec<String> = ["S", "END", "ENDS"].map(String::from).to_vec();
        let piece = TextStream::default().push(0, &decode_words, &stops);
        assert_eq!(piece, Piece { text: "x".into(), stopped_by: Some("ENDS".into()) });
    }

    #[test]
    fn a_decoder_that_drops_the_first_blank_keeps_the_others() {
        assert_eq!(run(b" one two", &pieces, &[]).1, "one two");
    }

    proptest! {
        /// Whatever the text and wherever tokens cut it, the shown text is the whole decoded text up to the stop string.
        #[test]
        fn shown_text_equals_decoding_everything(text in "[abé你🙂 ]{0,30}", stops in prop::collection::vec("[abé你]{1,3}", 0..3)) {
            let refs: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (_, shown) = run(text.as_bytes(), &bytes, &refs);
            // Text ends with the character that completes a stop string, so the first to be complete wins.
            let done = text.char_indices().map(|(i, c)| &text[..i + c.len_utf8()]).find(|t| stops.iter().any(|s| t.ends_with(s.as_str())));
            let expected = match done {
                Some(t) => &t[..stops.iter().filter(|s| t.ends_with(s.as_str())).map(|s| t.len() - s.len()).min().unwrap_or(0)],
                None => text.as_str(),
            };
            prop_assert_eq!(&shown, expected);
        }
    }
}
