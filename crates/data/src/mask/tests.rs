use super::*;
use crate::testing::{conversation, own_template, qwen3, shared, tiny};
use proptest::prelude::*;
use serde_json::{Map, json};

const CHATML: &str = include_str!("../template/builtin/chatml.jinja");
const ALPACA: &str = include_str!("../template/builtin/alpaca.jinja");
const LLAMA3: &str = include_str!("../template/builtin/llama3.jinja");

fn compile(source: &str) -> ChatTemplate {
    ChatTemplate::compile("test", source, &Map::new(), &[("bos_token", "<s>"), ("eos_token", "</s>")]).unwrap()
}

fn masker(source: &str, loss: LossOn) -> Masker {
    let added = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "</s>"].map(String::from);
    Masker::new(compile(source), loss, &added)
}

fn trained(masked: &Masked) -> Vec<&str> {
    masked.spans.iter().map(|s| &masked.text[s.range.clone()]).collect()
}

#[test]
fn shapes_are_learnt_from_the_template() {
    let shape = |source: &str| masker(source, LossOn::Assistant).shape.map(|s| (s.header, s.terminator));
    let pair = |a: &str, b: &str| Some((a.to_string(), b.to_string()));
    assert_eq!(shape(CHATML), pair("<|im_start|>assistant\n", "<|im_end|>"));
    assert_eq!(shape(LLAMA3), pair("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"));
    assert_eq!(shape(ALPACA), pair("### Response:\n", "</s>"));
    // As Mistral: no header of its own, no generation prompt.
    let mistral = "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}";
    assert_eq!(shape(mistral), pair("[/INST]", "</s>"));
    // As Phi: eos instead of a generation prompt, which begins like the next header.
    let phi = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}";
    assert_eq!(shape(phi), pair("<|assistant|>\n", "<|im_end|>"));
}

#[test]
fn every_shared_template_trains_what_the_model_says() {
    let Some(folder) = shared("chat") else { return };
    let Some(tokenizer) = qwen3() else { return };
    let talk = conversation(&json!([{"role": "system", "content": "s"}, {"role": "user", "content": "one <|im_end|>\n"},
        {"role": "assistant", "content": "1"}, {"role": "user", "content": "<|im_start|>assistant\nx"}, {"role": "assistant", "content": "two", "reasoning_content": "why"}]));
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "jinja") {
            continue;
        }
        seen += 1;
        let name = path.file_stem().unwrap().to_str().unwrap().to_string();
        let source = std::fs::read_to_string(&path).unwrap();
        let template = ChatTemplate::compile(&name, &source, &Map::new(), &[("bos_token", "<|begin_of_text|>")]).unwrap();
        let masker = Masker::new(template, LossOn::Assistant, tokenizer.added_tokens());
        let masked = masker.mask(&talk).unwrap();
        let spans = trained(&masked);
        assert_eq!(spans.len(), 2, "{name} {spans:?}");
        let end = if name.contains("llama") { "<|eot_id|>" } else { "<|im_end|>" };
        let header = if name.contains("llama") { "assistant<|end_header_id|>\n\n" } else { "<|im_start|>assistant\n" };
        for (span, (said, masked_span)) in spans.iter().zip(["1", "two"].iter().zip(&masked.spans)) {
            assert!(span.ends_with(&format!("{said}{end}")), "{name} {span:?}");
            assert!(masked.text[..masked_span.range.start].ends_with(header), "{name} {span:?}");
        }
        // And by tokens: what is trained decodes to the spans.
        let encoded = tokenizer.encode(&masked.text).unwrap();
        let mask = token_mask(tokenizer, &masked.text, &encoded, &masked.spans).unwrap();
        assert_eq!(mask.mismatches, 0, "{name}");
        for (tokens, span) in mask.spans.iter().zip(&spans) {
            let ids = &encoded.ids[tokens.start as usize..tokens.end as usize];
            // Llama's end token is plain text to this tokenizer, so its last token may reach over the border.
            let decoded = tokenizer.decode(ids, false).unwrap();
            assert!(decoded == *span || (name.contains("llama") && decoded.starts_with(span)), "{name} {decoded:?}");
        }
    }
    assert!(seen >= 20);
}

#[test]
fn rules_and_weights_choose_turns() {
    let talk = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "loss": 0.5}, {"role": "user", "content": "c", "loss": 0},
        {"role": "assistant", "content": "d", "loss": false}, {"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}]);
    let spans = |loss, talk| {
        let masked = masker(CHATML, loss).mask(&conversation(talk)).unwrap();
        masked.spans.iter().map(|s| (masked.text[s.range.clone()].to_string(), s.weight)).collect::<Vec<_>>()
    };
    let pair = |a: &str, w: f32| (a.to_string(), w);
    assert_eq!(spans(LossOn::Assistant, &talk), [pair("b<|im_end|>", 0.5), pair("f<|im_end|>", 1.0)]);
    let plain = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]);
    assert_eq!(spans(LossOn::Last, &plain), [pair("d<|im_end|>", 1.0)]);
    let all = spans(LossOn::All, &plain);
    assert_eq!(all, [(masker(CHATML, LossOn::All).mask(&conversation(&plain)).unwrap().text, 1.0)]);
    let masked_turn = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "loss": 0}]);
    assert_eq!(spans(LossOn::All, &masked_turn), [pair("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", 1.0), pair("\n", 1.0)]);
    let wrong = json!([{"role": "user", "content": "a", "loss": 1}, {"role": "assistant", "content": "b"}]);
    let error = masker(CHATML, LossOn::Assistant).mask(&conversation(&wrong)).unwrap_err();
    assert!(error.starts_with("messages[0].loss"), "{error}");
}

#[test]
fn templates_without_end_token_or_header_still_have_masks() {
    let talk = conversation(
        &json!([{"role": "user", "content": "a\n\nB: x"}, {"role": "assistant", "content": " b "}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]),
    );
    let open = "{% for m in messages %}{{ 'A: ' if m.role == 'user' else 'B: ' }}{{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}B: {% endif %}";
    assert_eq!(trained(&masker(open, LossOn::Assistant).mask(&talk).unwrap()), [" b", "d"]);
    let bare = "{% for m in messages %}{{ m.content }}|{% endfor %}";
    assert_eq!(trained(&masker(bare, LossOn::Assistant).mask(&talk).unwrap()), [" b |", "d|"]);
    let hopeless = "{{ messages | length }}";
    let error = masker(hopeless, LossOn::Assistant).mask(&talk).unwrap_err();
    assert!(error.starts_with("the mask cannot be determined for template test"), "{error}");
}

/// Contents that try to pass for the template's own text.
fn content() -> impl Strategy<Value = String> {
    let pieces = prop::sample::select(vec![
        "a",
        " ",
        "\n",
        "é",
        "<|im_start|>assistant\n",
        "<|im_end|>",
        "<|im_end|>\n",
        "<|im_start|>",
        "user\n",
        "<think>\n",
        "</think>\n\n",
        "\u{F0000}",
        "### Response:\n",
        "</s>",
        "<|eot_id|>",
        "<tool_response>",
        "</tool_response>",
        "{{ x }}",
        "{% generation %}",
        "e\u{301}",
    ]);
    prop::collection::vec(pieces, 0..6).prop_map(|p| p.concat())
}

fn talk() -> impl Strategy<Value = Vec<(bool, String)>> {
    prop::collection::vec((any::<bool>(), content()), 1..7).prop_filter("someone answers", |t| t.iter().any(|(a, _)| *a))
}

fn as_conversation(talk: &[(bool, String)]) -> Conversation {
    let role = |assistant: bool| if assistant { "assistant" } else { "user" };
    conversation(&talk.iter().map(|(a, c)| json!({"role": role(*a), "content": c})).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// ChatML is simple enough to know the answer: the content and its end token.
    #[test]
    fn chatml_trains_exactly_what_the_assistant_says(talk in talk()) {
        let c = as_conversation(&talk);
        let masker = masker(CHATML, LossOn::Assistant);
        let masked = masker.mask(&c).unwrap();
        let mut at = 0;
        let mut want = Vec::new();
        for (assistant, content) in &talk {
            at += if *assistant { "<|im_start|>assistant\n" } else { "<|im_start|>user\n" }.len();
            let end = at + content.len() + "<|im_end|>".len();
            if *assistant {
                want.push(at..end);
            }
            at = end + 1;
        }
        prop_assert_eq!(masked.spans.iter().map(|s| s.range.clone()).collect::<Vec<_>>(), want);
    }

    /// The cheap method and the general one agree wherever the cheap one dares to answer.
    #[test]
    fn both_methods_agree(talk in talk(), source in prop::sample::select(vec![CHATML, LLAMA3, include_str!("../template/builtin/qwen3.jinja")])) {
        let c = as_conversation(&talk);
        let masker = masker(source, LossOn::Assistant);
        let shape = masker.shape.as_ref().unwrap();
        let text = masker.template.render(&c).unwrap().text;
        let count = talk.iter().filter(|t| t.0).count();
        if let (Some(plain), Some(placed)) =
            (turns::plain(shape, &c, &text, count), turns::with_placeholders(&masker.template, shape, &c, &text))
        {
            prop_assert_eq!(plain, placed);
        }
    }

    /// Whatever the template strips or adds, what is trained begins after a header and ends with the end token.
    #[test]
    fn qwen3_masks_are_framed(talk in talk()) {
        let c = as_conversation(&talk);
        let masker = masker(include_str!("../template/builtin/qwen3.jinja"), LossOn::Assistant);
        if let Ok(masked) = masker.mask(&c) {
            prop_assert_eq!(masked.spans.len(), talk.iter().filter(|t| t.0).count());
            for span in &masked.spans {
                prop_assert!(masked.text[..span.range.start].ends_with("<|im_start|>assistant\n"));
                prop_assert!(masked.text[span.range.clone()].ends_with("<|im_end|>"));
                prop_assert!(masked.text[span.range.end..].starts_with('\n'));
            }
        }
    }

    /// Tokens are trained exactly where the text is, with a real tokenizer (special tokens, NFC, multi-byte pieces).
    #[test]
    fn trained_tokens_decode_to_the_trained_text(talk in talk()) {
        let tokenizer = tiny();
        let masker = Masker::new(own_template(&tokenizer), LossOn::Assistant, tokenizer.added_tokens());
        let masked = masker.mask(&as_conversation(&talk)).unwrap();
        let encoded = tokenizer.encode(&masked.text).unwrap();
        let mask = token_mask(&tokenizer, &masked.text, &encoded, &masked.spans).unwrap();
        prop_assert_eq!((mask.mismatches, mask.border_tokens), (0, 0));
        prop_assert_eq!(mask.spans.len(), masked.spans.len());
        for (tokens, text) in mask.spans.iter().zip(trained(&masked)) {
            let ids = &encoded.ids[tokens.start as usize..tokens.end as usize];
            prop_assert_eq!(tokenizer.decode(ids, false).unwrap(), tokenizer.normalise(text));
        }
    }
}
